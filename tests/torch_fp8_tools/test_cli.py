import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_fp8
from tests.internals import REMOVED_OF_ENV as REMOVED
from tests.internals import Result, _version, cards, cli, whole_file
from tests.internals import env_machine as machine
from tests.internals import env_result as result

ROOT = Path(__file__).resolve().parents[2]
FINE = Result("self-test", "fine", "ok", "31.5 dB")
WRONG = Result("self-test", "wrong", "failed", "no FP8", log="Traceback of no such recipe")


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """``plant(results)``: the self-test has these, and no host is looked at."""

    def install(*results):
        monkeypatch.setattr(machine, "SUBJECTS", [result.name for result in results])
        monkeypatch.setattr(machine, "smoke", lambda subjects: iter(results))

    monkeypatch.setattr(machine, "hosts", lambda: [Result("hosts", "accelerate", "ok", "1.15.0")])
    monkeypatch.chdir(tmp_path)
    return install


def test_all_green_is_0_and_something_red_is_1_with_a_traceback(plant, tmp_path, capsys):
    plant(FINE)
    assert cli.main(["env", "--self-test"]) == 0
    printed = capsys.readouterr()
    assert "[1/1] fine ok" in printed.err
    assert torch.__version__ in printed.out
    plant(WRONG, FINE)
    assert cli.main(["env", "--self-test"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"wrong +FAILED", out)
    assert re.search(r"fine +ok", out)
    assert "\nself-test: wrong\nTraceback of no such recipe\n" in out
    assert "1 failed, 0 not run (wrong)" in out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_json_is_all_that_is_printed(plant, capsys):
    plant(WRONG)
    assert cli.main(["env", "--self-test", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is False
    by_name = {result["name"]: result for result in printed["results"]}
    assert by_name["wrong"]["status"] == "failed"
    assert by_name["torch"]["detail"] == torch.__version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["env", "--self-test", "--only", "luck"],
        ["env", "--self-test", "--only", "kernels", "speed"],
        ["export", "in", "out", "--format", "gguf"],
        ["fly"],
        [],
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_call_is_2(plant, arguments, capsys):
    plant()
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert "usage: torch-fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["plan", "gpt", "--sequense", "32"], "did you mean '--sequence'?"),
        (["plan", "gpt", "--recipe", "rowwize"], "did you mean 'rowwise'?"),
        (["plann", "gpt"], "did you mean 'plan'?"),
        (["plan", "here", "--recipe", "rowwise_with_gw_hp"], "recipe='rowwise', wgrad='bf16'"),
        (["export", "in", "out", "--format", "modeloptt"], "did you mean 'modelopt'?"),
    ],
    ids=str,
)
def test_a_misspelled_word_is_answered_with_the_nearest(arguments, meant, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert meant in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_missing_and_a_name_of_the_hub_have_a_way_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(model, *more):
        assert cli.main(["export", model, "out", "--format", "modelopt", *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1  # no usage in front of it
        return error

    assert "hf download org/tiny" in run("org/tiny")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "--device cuda: this torch was built" in run("tiny", "--device", "cuda")
    assert "Use --device cpu" in run("tiny", "--device", "cuda")
    assert "use cpu, cuda or cuda:0" in run("tiny", "--device", "gpu0")


def test_each_option_says_what_it_is():
    silent = [
        f"{name} {action.dest}"
        for name, parser in cli._parser().commands.items()
        for action in parser._actions
        if not action.help
    ]
    assert silent == []


@pytest.mark.parametrize("options", [[], ["--all"], ["--self-test"]], ids=str)
def test_what_is_known_is_printed_before_hosts_are_imported(options, plant, monkeypatch, capsys):
    seen = []

    def imported():
        seen.append(capsys.readouterr())
        return [Result("hosts", "trl", "ok", "1.16.0")]

    plant()
    monkeypatch.setattr(machine, "hosts", imported)
    assert cli.main(["env", *options]) == 0
    (before,) = seen
    assert torch.__version__ in before.out
    assert "cards" in before.out
    assert "importing each installed host" in before.err
    assert "trl" in capsys.readouterr().out


def test_a_machine_that_cannot_be_described_is_a_red_line(plant, monkeypatch, capsys):
    def lost():
        raise RuntimeError("the driver is another one than the library")

    plant()
    monkeypatch.setattr(machine, "cards", lost)
    assert cli.main(["env"]) == 1
    assert re.search(r"lost +FAILED +RuntimeError: the driver is another", capsys.readouterr().out)


def test_extended_modules_are_printed_on_request_or_if_they_failed(plant, monkeypatch, capsys):
    points = [Result("hosts", f"trl:Trainer.point{i}", "ok", "extended", part=True) for i in "abc"]
    plant()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(machine, "hosts", lambda: [Result("hosts", "trl", "ok", "1.16.0"), *points])
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= 80  # a path is one word
    assert any(re.search(r"trl +ok +1\.16\.0", line) for line in lines)
    assert not any("Trainer.point" in line for line in lines)
    assert cli.main(["env", "--all"]) == 0
    assert capsys.readouterr().out.count("trl:Trainer.point") == 3
    failed = Result("hosts", "trl:Trainer.pointd", "failed", "moved")
    monkeypatch.setattr(machine, "hosts", lambda: [*points, failed])
    assert cli.main(["env"]) == 1
    assert re.search(r"trl:Trainer.pointd +FAILED +moved", capsys.readouterr().out)


def test_a_report_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "report.txt"

    def full(*names):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"), whole_file(path) as partial:
        partial.write_text("text")
    assert list(tmp_path.iterdir()) == []


ENTRIES = {
    "module": ["-m", "torch_fp8"],
    "script": ["-c", "import sys, _fp8_command as c; sys.exit(c.main())"],
}


def _run(entry, *arguments, folder=ROOT):
    search = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *ENTRIES[entry], *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search},
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize("entry", ENTRIES)
def test_both_entries_print_the_version_or_in_a_line_that_torch_is_old(tmp_path, entry):
    """The package of a torch that is yet to come, as far as it is read."""
    assert _run(entry, "--version").stdout == f"torch-fp8 {torch_fp8.__version__}\n"
    (tmp_path / "torch_fp8").mkdir()
    for name in ("__init__.py", "__main__.py", "_version.py"):
        code = (ROOT / "torch_fp8" / name).read_text()
        code = code.replace("OLDEST_TORCH = (2, 11)", "OLDEST_TORCH = (99, 0)")
        (tmp_path / "torch_fp8" / name).write_text(code)
    done = _run(entry, "env", folder=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "torch-fp8 needs torch 99.0 or later" in line


def test_a_command_that_cannot_start_says_why(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    done = _run("script", "env", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "torch-fp8 cannot start: OSError: libcudart.so.13: cannot open\n"


def test_a_terminal_without_utf_8(plant, monkeypatch):
    monkeypatch.setattr(machine, "hosts", lambda: [Result("hosts", "caf\u00e9", "ok")])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert cli.main(["env"]) == 0
    sys.stdout.flush()
    assert rb"caf\xe9" in sys.stdout.buffer.getvalue()


def test_the_version_without_metadata_is_that_of_the_source_tree(monkeypatch):
    def none(name):
        raise _version.metadata.PackageNotFoundError(name)

    assert torch_fp8.__version__ == _version.installed_version()
    monkeypatch.setattr(_version.metadata, "version", none)
    assert f'version = "{_version.installed_version()}"' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def shown(monkeypatch):
    """``shown((major, minor), ...)``: what is told of cards of these capabilities."""

    def show(*capabilities, cuda="13.0"):
        def properties(device):
            device = torch.device("cuda", device) if isinstance(device, int) else device
            major, minor = capabilities[device.index]
            name, memory = f"Card {major}{minor}", 80 * 2**30
            return SimpleNamespace(name=name, major=major, minor=minor, total_memory=memory)

        def capability(device):
            return properties(torch.device(device)).major, properties(torch.device(device)).minor

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        return {result.name: result for result in cards.cards()}

    return show


def test_what_a_hopper_card_runs_and_why_not(shown):
    found = shown((9, 0))
    assert found["cuda:0"].detail == "Card 90, sm_90, 80.0 GiB"
    assert found["cuda:0 blockwise"].status == "ok"
    assert "cannot run block_1x32 GEMMs" in found["cuda:0 mxfp8"].detail
    assert "need CUDA 12.9" in shown((9, 0), cuda="12.6")["cuda:0 blockwise"].detail


def test_why_there_is_no_card(shown, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all of them" in shown()["none"].detail
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "torch finds none" in shown()["none"].detail
    assert "built for the CPU" in shown(cuda=None)["none"].detail


def test_subjects_that_are_asked_for_alone(plant, monkeypatch, capsys):
    asked = []
    plant()
    monkeypatch.setattr(machine, "smoke", lambda subjects: asked.append(subjects) or [])
    assert cli.main(["env", "--self-test", "--only", "kernels", "rowwise"]) == 0
    assert asked == [["kernels", "rowwise"]]
    out = capsys.readouterr().out
    assert "accelerate" not in out
    assert "autoload" not in out  # in a checkout that is not installed it fails


@pytest.mark.parametrize("part", REMOVED)
def test_a_part_that_the_self_test_had_is_refused_with_what_to_take(part, capsys):
    with pytest.raises(SystemExit):
        cli.main(["env", "--self-test", "--only", part])
    error = " ".join(capsys.readouterr().err.split())
    assert f"'{part}' is no longer tested alone: {REMOVED[part]}" in error


def test_a_name_in_brackets_is_printed_as_it_is():
    results = [Result("hosts", "[red]trl", "failed", "pip install torch-fp8[lightning]")]
    line = r"\[red\]trl +FAILED +pip install torch-fp8\[lightning\]"
    assert re.search(line, result.lines(results))
    assert result.summary(results) == "0 ok, 1 failed, 0 not run ([red]trl)"

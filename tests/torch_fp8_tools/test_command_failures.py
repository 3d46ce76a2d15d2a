import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.internals import cli, model_folder

ROOT = Path(__file__).resolve().parents[2]


def test_what_no_command_expects_is_one_line_and_a_file(monkeypatch, tmp_path, capsys):
    def fail(options):
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("torch_fp8_tools.plan.plan.run", fail)
    assert cli.main(["plan", "llama-3.1-8b"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "torch-fp8 plan: KeyError: 'nobody thought of this'. This is a bug in" in said
    (log,) = tmp_path.glob("torch-fp8-*.txt")
    assert str(log) in said
    assert "nobody thought of this" in log.read_text()
    assert "Traceback" in log.read_text()


def test_a_full_disk_is_one_line_and_no_fault(monkeypatch, capsys):
    def fail(options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_fp8_tools.env.machine.describe", fail)
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err == "torch-fp8 env: [Errno 28] No space left on device\n"


def test_an_interrupt_of_any_command_is_130(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_fp8_tools.plan.plan.run", interrupt)
    assert cli.main(["plan", "llama-3.1-8b"]) == 130
    assert capsys.readouterr().err == "interrupted: nothing was written\n"
    monkeypatch.setattr("torch_fp8_tools.stock_states.convert", interrupt)
    assert cli.main(["convert-optimizer", "states", "converted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_names_of_the_hub_are_looked_up_in_its_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_folder("org/tiny") is None
    cache = tmp_path / "models--org--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    (snapshot / "config.json").write_text(json.dumps(fields))
    assert model_folder("org/tiny") == snapshot
    assert cli.main(["plan", "org/tiny", "--level", "O2"]) == 0


def test_no_message_installs_from_an_index_where_the_package_is_not():
    """torch-fp8 is installed from a clone, or from a file of a release."""
    for package in ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"install[^\n]*torch-fp8\[", path.read_text()), path


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
CONFIG = {"config.json": json.dumps(LLAMA).encode()}
INDEX = "model.safetensors.index.json"
BROKEN = {
    "missing": None,
    "empty folder": {},
    "no JSON": {"config.json": b"{oops"},
    "a list": {"config.json": b"[1]"},
    "null": {"config.json": b"null"},
    "no type": {"config.json": b'{"a": 1}'},
    "no class": {"config.json": b'{"architectures": ["NoSuchModel"]}'},
    "unknown type": {"config.json": b'{"model_type": "nonesuch"}'},
    "sizes in words": {"config.json": json.dumps({**LLAMA, "hidden_size": "wide"}).encode()},
    "no heads": {"config.json": json.dumps({**LLAMA, "num_attention_heads": 0}).encode()},
    "no weights": CONFIG,
    "empty weights": {**CONFIG, "model.safetensors": b""},
    "huge header": {**CONFIG, "model.safetensors": (1 << 40).to_bytes(8, "little") + b"{}"},
    "index of nothing": {**CONFIG, INDEX: b'{"weight_map": {"a": "missing.safetensors"}}'},
    "index of a number": {**CONFIG, INDEX: b'{"weight_map": 3}'},
    "no statistics": {"fp8_monitor.jsonl": b"{oops\n"},
    "statistics in words": {"fp8_monitor.jsonl": b'{"step": "a", "loss": null, "layers": 3}\n'},
    "a file": b"\x00\xff\x80 no tensors",
    "an empty file": b"",
}
COMMANDS = {
    "plan": ["plan", "{path}", "--level", "O2"],
    "export": ["export", "{path}", "{out}", "--format", "fine-grained", "--recipe", "blockwise"],
    "convert-optimizer": ["convert-optimizer", "{path}", "{out}"],
    "report": ["report", "{path}"],
}
PLANNED = ("no weights", "empty weights", "huge header", "index of nothing", "index of a number")
"""What ``plan`` can do, which looks at the configuration alone."""


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("command", COMMANDS)
def test_broken_input_is_a_line_and_an_exit_status(command, content, tmp_path, capsys):
    path, files = tmp_path / "input", BROKEN[content]
    if isinstance(files, bytes):
        path.write_bytes(files)
    elif files is not None:
        path.mkdir()
        for name, value in files.items():
            (path / name).write_bytes(value)
    words = [word.format(path=path, out=tmp_path / "output") for word in COMMANDS[command]]
    status = cli.main(words)
    said = capsys.readouterr().err
    if command == "plan" and content in PLANNED:
        assert status == 0
        return
    assert status in (1, 2)
    assert f"torch-fp8 {command}: " in said
    assert "bug in torch-fp8" not in said
    assert "Traceback" not in said
    assert not (tmp_path / "output").exists()


WRONG = {
    "plan": [
        s.split() for s in ("--gpus 0", "--card abacus", "--memory nan", "--sequence 9999999")
    ],
    "export": (["--config", "{bad"], ["--config", '{"nope": 1}'], ["--max-shard-size", "x"]),
    "convert-optimizer": ([],),
    "report": ([],),
    "env": (["--only", "kernels"],),
}


@pytest.mark.parametrize(
    ("command", "options"),
    [(name, options) for name, every in WRONG.items() for options in every],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_wrong_options_are_a_line_and_exit_status(command, options, tiny_llama, tmp_path, capsys):
    words = [w.format(path=tiny_llama, out=tmp_path / "o") for w in COMMANDS.get(command, ["env"])]
    try:
        status = cli.main([*words, *options])
    except SystemExit as error:
        status = error.code
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert f"torch-fp8 {command}: " in said
    assert "bug in torch-fp8" not in said


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    sizes = {k: v for k, v in LLAMA.items() if k not in ("model_type", "architectures")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(folder)
    return folder


PRINTS = """
import sys, _fp8_command
from torch_fp8_tools.plan import plan
plan.run = lambda options: print("a plan") or 0
sys.exit(_fp8_command.main())
"""
OUTPUTS = {"a closed pipe": "", "no output": ">&-", "a full disk": ">/dev/full"}


@pytest.mark.long
@pytest.mark.parametrize("where", OUTPUTS)
def test_output_that_nobody_takes_is_no_fault(where, forked_python):
    """A reader that has gone, ``torch-fp8 plan ... | head -1``; a shell that closed the output."""
    read, write = os.pipe()
    os.close(read)
    command = [forked_python, "-c", PRINTS, "plan", "llama-3.1-8b"]
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {OUTPUTS[where]}', "bash", *command],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    status = {"a closed pipe": 1, "no output": 0, "a full disk": 2}[where]
    assert done.returncode == status, done.stderr
    assert "bug in torch-fp8" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert ("No space left" in done.stderr) == (where == "a full disk")

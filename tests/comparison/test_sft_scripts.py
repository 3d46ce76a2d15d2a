"""Both fine-tuning scripts end to end, in processes of their own."""

import csv
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from run_record import read_losses
from safetensors.torch import load_file

from .conftest import EXAMPLES, environment_in, gemm_counts, run_example

pytestmark = pytest.mark.long

LAUNCH = ["-m", "accelerate.commands.launch", "--num_processes", "1"]
LAUNCH += ["--num_cpu_threads_per_process", "1"]


@dataclass(frozen=True)
class Host:
    script: str
    bf16: str
    fp8: str

    def command(
        self, precision: str | None, *arguments: str, python: str = sys.executable
    ) -> list[str]:
        script = [str(EXAMPLES / self.script), *arguments]
        if precision is None:
            return [python, *script]
        if self.script == "sft_lightning.py":
            return [python, *script, "--precision", precision]
        return [python, *LAUNCH, "--mixed_precision", precision, *script]


HOSTS = {
    "lightning": Host("sft_lightning.py", "bf16-mixed", "fp8-mixed"),
    "accelerate": Host("sft_accelerate.py", "bf16", "fp8"),
}


def arguments(assets_cache: Path) -> list[str]:
    short = ["--steps", "6", "--eval-every", "2", "--eval-examples", "6", "--max-length", "256"]
    return ["--quick", *short, "--assets", str(assets_cache)]


@pytest.fixture(params=HOSTS.values(), ids=list(HOSTS))
def host(request) -> Host:
    return request.param


@pytest.fixture
def compared(once, assets_cache, forked_python):
    """`compared(host)`: the folder in which the host's script compared the two precisions.

    It imports what it needs itself, with the warnings that this brings.
    """

    def compare(host: Host) -> Path:
        def make(folder: Path) -> None:
            given = [*arguments(assets_cache), "--output", str(folder / "out")]
            command = host.command(None, *given, python=forked_python)
            (folder / "printed").write_text(run_example(command, folder))

        return once(host.script, make)

    return compare


def test_the_scripts_say_nothing_of_fp8_but_the_flag(host):
    source = (EXAMPLES / host.script).read_text()
    assert not re.search(r"torch_fp8|lightning_fp8|accelerate_fp8|Float8", source)


def test_without_arguments_two_precisions_are_compared(host, compared):
    folder = compared(host)
    rows = list(csv.DictReader((folder / "out/comparison.csv").open()))
    assert [row["precision"] for row in rows] == [host.bf16, host.fp8]
    assert [row["fp8_linears"] for row in rows] == ["0 of 15", "14 of 15"]
    # Two micro-batches are summed in float32.
    assert [round(float(row["bytes_per_parameter"]), 2) for row in rows] == [16, 9.07]
    for row in rows:
        assert float(row["final_eval_loss"]) < float(row["first_eval_loss"]) - 0.05
    assert 0 < abs(float(rows[1]["difference"])) < 0.005
    assert (folder / "out/comparison.png").read_bytes().startswith(b"\x89PNG")
    printed = (folder / "printed").read_text()
    assert "14 of 15" in printed
    assert "emulated" in printed


def test_the_plan_comes_first_and_the_expected_time_before_training(host, compared):
    printed = (compared(host) / "printed").read_text()
    assert printed.startswith("Fine-tuning of a small Llama made here on docstrings")
    places = [printed.index(text) for text in ("Ctrl-C", "Checked: ", "Expected from", "===")]
    assert places == sorted(places)
    assert re.search(r"about [\d.]+ minutes, \d+ s in BF16 and \d+ s in FP8", printed)


def test_host_warnings_that_mean_nothing_are_not_shown(host, compared):
    printed = (compared(host) / "printed").read_text()
    for noise in ("LeafSpec", "Tip:", "torchao", "many workers", "not passed to `accelerate"):
        assert noise not in printed


def test_fp8_gemms_run_in_the_fp8_run_only(host, compared):
    folder = compared(host)
    assert gemm_counts(folder, f"/{host.bf16}")["scaled_mm"] == 0
    assert gemm_counts(folder, f"/{host.bf16}")["linear"] > 0
    assert gemm_counts(folder, f"/{host.fp8}")["scaled_mm"] > 14 * 3 * 6  # layers, GEMMs, steps


def test_both_hosts_train_alike(compared):
    """The same data in the same order, clipped and scheduled alike: the same losses."""
    lightning, accelerate = (
        read_losses(compared(host) / "out" / host.bf16 / "losses.csv") for host in HOSTS.values()
    )
    assert [row["step"] for row in lightning] == [row["step"] for row in accelerate]
    for row, other in zip(lightning, accelerate, strict=True):
        for key in {"loss", "eval_loss"} & row.keys():
            assert row[key] == pytest.approx(other[key], rel=1e-5)


def test_the_model_is_saved_plain(host, compared, assets_cache):
    saved = load_file(compared(host) / "out" / host.fp8 / "model/model.safetensors")
    original = load_file(assets_cache / "quick/model/model.safetensors")
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in original.items()}
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_a_killed_run_goes_on_to_the_same_losses(
    host, compared, assets_cache, forked_hosts, tmp_path
):
    output = tmp_path / "out"
    # Accelerate's launcher starts another process, which only a real one takes with it.
    python = forked_hosts if host.script == "sft_lightning.py" else sys.executable
    given = [*arguments(assets_cache), "--output", str(output)]
    command = host.command(host.fp8, *given, python=python)
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            command,
            env=environment_in(tmp_path),
            stdout=log,
            stderr=log,
            start_new_session=True,  # the launcher's child is to die with it
        )
        deadline = time.monotonic() + 200
        while not (len(read_losses(output / "losses.csv")) >= 6 and complete_checkpoints(output)):
            assert run.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert not (output / "result.json").exists()
    run_example([forked_hosts, *command[1:], "--resume"], tmp_path)
    rows = read_losses(output / "losses.csv")
    whole = read_losses(compared(host) / "out" / host.fp8 / "losses.csv")
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in whole]


def complete_checkpoints(output: Path) -> list[Path]:
    folder = output / "checkpoints"
    return [*folder.glob("last.ckpt"), *folder.glob("step-*")]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_ends_a_run_with_its_number_and_leaves_no_result(
    host, signum, assets_cache, forked_hosts, tmp_path
):
    """Lightning takes SIGTERM for an early, regular end: status 0.

    Accelerate's launcher passes nothing on, so there it is the comparison that is ended.
    """
    precision = None if host.script == "sft_accelerate.py" else host.fp8
    output = tmp_path / "out"
    steps = ["--quick", "--steps", "500", "--assets", str(assets_cache)]
    command = host.command(precision, *steps, "--output", str(output), python=forked_hosts)
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            command,
            env=environment_in(tmp_path),
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            preexec_fn=functools.partial(signal.signal, signum, signal.SIG_DFL),
        )
        deadline = time.monotonic() + 200
        while not any(len(read_losses(path)) >= 2 for path in output.rglob("losses.csv")):
            assert run.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signum)
        assert run.wait(timeout=60) == 128 + signum
    printed = (tmp_path / "log").read_text()
    assert f"ended by {signum.name}" in printed
    assert "Traceback" not in printed
    assert not list(output.rglob("result.json"))
    (losses,) = output.rglob("losses.csv")
    rows = len(read_losses(losses))
    time.sleep(1.0)
    assert len(read_losses(losses)) == rows  # nobody trains on


def test_resuming_without_a_checkpoint_is_refused(host, forked_hosts, tmp_path):
    for precision in (None, host.bf16):
        given = ["--resume", "--output", str(tmp_path / "out")]
        command = host.command(precision, *given, python=forked_hosts)
        run = subprocess.run(
            command, env=environment_in(tmp_path), capture_output=True, text=True, cwd=tmp_path
        )
        assert run.returncode == 1
        assert "--resume: there is no checkpoint in" in run.stderr
        if precision is None:
            assert run.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("lightning", ["--data", "rows.jsonl"], "rows.jsonl, line 2: not JSON"),
        ("accelerate", ["--model", "./nowhere"], "--model ./nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_made(name, given, said, forked_hosts, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "completion": "y"}\n{"prompt": \n')
    run = subprocess.run(
        HOSTS[name].command(None, *given, python=forked_hosts),
        env=environment_in(tmp_path),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 1
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "runs").exists()


ROWS = {
    "chat": lambda i: {
        "messages": [
            {"role": "user", "content": f"what is {i}"},
            {"role": "assistant", "content": f"the number {i}"},
        ]
    },
    "prompt": lambda i: {"prompt": f"what is {i}? ", "completion": f"the number {i}"},
}


@pytest.mark.parametrize(("name", "rows"), [("lightning", "chat"), ("accelerate", "prompt")])
def test_any_model_and_any_data(name, rows, assets_cache, forked_hosts, tmp_path):
    """Padded batches of one's own data, one epoch of it; both hosts read it by the same code."""
    host = HOSTS[name]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(ROWS[rows](i)) + "\n" for i in range(21)))
    model = assets_cache / "quick/model"
    own = ["--model", str(model), "--data", str(data), "--batching", "padded"]
    own += ["--batch-size", "4", "--output", str(tmp_path / "out")]
    run_example(host.command(host.fp8, *own, python=forked_hosts), tmp_path)
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["steps"] == 3  # 20 examples, one of 21 held out, 4 rows x 2 micro-batches a step
    assert result["final_eval_loss"] < result["first_eval_loss"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8-mixed"])
def test_the_fabric_loop_runs(precision, assets_cache, forked_hosts, tmp_path):
    script = [str(EXAMPLES / "fabric_loop.py"), "--steps", "4", "--assets", str(assets_cache)]
    printed = run_example([forked_hosts, *script, "--precision", precision], tmp_path)
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (gemm_counts(tmp_path, precision)["scaled_mm"] > 0) == (precision == "fp8-mixed")

"""The fine-tuning script end to end, in processes of its own."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_record import read_losses
from safetensors.torch import load_file

from .conftest import EXAMPLES, environment_in, gemm_counts, run_example

pytestmark = pytest.mark.long

PRECISIONS = ("bf16-mixed", "fp8-mixed")
SCRIPT = EXAMPLES / "sft_lightning.py"


def command(precision: str, *arguments: str, python: str = sys.executable) -> list[str]:
    return [python, str(SCRIPT), *arguments, "--precision", precision]


def arguments(assets_cache: Path) -> list[str]:
    short = ["--steps", "6", "--eval-every", "2", "--eval-examples", "6", "--max-length", "256"]
    return ["--quick", *short, "--assets", str(assets_cache)]


@pytest.fixture
def trained(once, assets_cache, forked_python):
    """The folder in which the script trained in both precisions."""

    def make(folder: Path) -> None:
        for precision in PRECISIONS:
            given = [*arguments(assets_cache), "--output", str(folder / precision)]
            run_example(command(precision, *given, python=forked_python), folder)

    return once(SCRIPT.name, make)


def test_the_script_says_nothing_of_fp8_but_the_flag():
    assert not re.search(r"torch_fp8\.|lightning_fp8|accelerate_fp8|Float8", SCRIPT.read_text())


def test_both_precisions_are_trained_from_the_same_model(trained, assets_cache):
    results = [json.loads((trained / p / "result.json").read_text()) for p in PRECISIONS]
    # Two micro-batches are summed in float32.
    assert [round(result["bytes_per_parameter"], 2) for result in results] == [16, 9.07]
    losses = [result["final_eval_loss"] for result in results]
    assert losses[0] < results[0]["first_eval_loss"] - 0.05
    assert 0 < abs(losses[1] / losses[0] - 1) < 0.005
    assert gemm_counts(trained, "bf16-mixed")["scaled_mm"] == 0
    assert gemm_counts(trained, "fp8-mixed")["scaled_mm"] > 14 * 3 * 6  # layers, GEMMs, steps
    saved = load_file(trained / "fp8-mixed/model/model.safetensors")
    original = load_file(assets_cache / "quick/model/model.safetensors")
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in original.items()}
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_a_killed_run_goes_on_to_the_same_losses(trained, assets_cache, forked_hosts, tmp_path):
    output = tmp_path / "out"
    given = [*arguments(assets_cache), "--output", str(output)]
    program = command("fp8-mixed", *given, python=forked_hosts)
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            program, env=environment_in(tmp_path), stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + 200
        while not (len(read_losses(output / "losses.csv")) >= 6 and complete_checkpoints(output)):
            assert run.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert not (output / "result.json").exists()
    run_example([*program, "--resume"], tmp_path)
    rows = read_losses(output / "losses.csv")
    whole = read_losses(trained / "fp8-mixed/losses.csv")
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in whole]


def complete_checkpoints(output: Path) -> list[Path]:
    folder = output / "checkpoints"
    return [*folder.glob("last.ckpt"), *folder.glob("step-*")]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_ends_a_run_with_its_number_and_leaves_no_result(
    signum, assets_cache, forked_hosts, tmp_path
):
    """Lightning takes SIGTERM for an early, regular end: status 0."""
    output = tmp_path / "out"
    steps = ["--quick", "--steps", "500", "--assets", str(assets_cache)]
    program = command("fp8-mixed", *steps, "--output", str(output), python=forked_hosts)
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            program,
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--data", "rows.jsonl"], "rows.jsonl, line 2: not JSON"),
        (["--model", "./nowhere"], "--model ./nowhere: there is no such folder"),
        (["--resume"], "--resume: there is no checkpoint in"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_made(given, said, forked_hosts, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "completion": "y"}\n{"prompt": \n')
    run = subprocess.run(
        command("bf16-mixed", *given, python=forked_hosts),
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


@pytest.mark.parametrize("rows", ROWS)
def test_any_model_and_any_data(rows, assets_cache, forked_hosts, tmp_path):
    """Padded batches of one's own data, one epoch of it."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(ROWS[rows](i)) + "\n" for i in range(21)))
    model = assets_cache / "quick/model"
    own = ["--model", str(model), "--data", str(data), "--batching", "padded"]
    own += ["--batch-size", "4", "--output", str(tmp_path / "out")]
    run_example(command("fp8-mixed", *own, python=forked_hosts), tmp_path)
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["steps"] == 3  # 20 examples, one of 21 held out, 4 rows x 2 micro-batches a step
    assert result["final_eval_loss"] < result["first_eval_loss"]

"""``torch-fp8 compare`` on tiny programs under each host, and on those it cannot compare."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.internals import FAST_CPU, _processes_of
from tests.internals import comparison_module as comparison
from tests.torch_fp8_tools.compare.conftest import PROGRAM

TRIALS = ("bf16-seed0", "bf16-seed1", "O2-seed0", "O2-seed1")


@pytest.mark.parametrize(
    ("host", "said"),
    [
        *(("accelerate", "fp8"), ("fabric", "fp8"), ("trainer", "fp8"), ("trainer", "bf16")),
        *(("transformers", "bf16"), ("own", "fp8")),
    ],
)
def test_a_program_runs_in_both_precisions_whatever_it_says(host, said, compare):
    """The plugin and the handler say O3; the variant says O2."""
    status, report = compare(host, "--precision", said)
    assert status == 0, report
    bf16, fp8 = report["variants"]
    assert bf16["steps"] == fp8["steps"] == 6
    assert (bf16["layers"], bf16["fp8_layers"]) == (0, 0)
    assert (fp8["layers"], fp8["fp8_layers"]) == (4, 2)
    assert abs(fp8["loss_difference"]) < 0.01
    assert bf16["loss"] != fp8["loss"]
    assert min(fp8["peak_bytes"], bf16["peak_bytes"]) > 4 * 4 * 8775  # weights, AdamW, gradients
    assert not [note for note in report["notes"] if "other weights" in note or "batches" in note]
    assert json.loads(Path("out/fp8_config.json").read_text())["opt_level"] == "O2"


def test_a_slow_loader_and_a_worse_loss_are_found_and_layers_in_bf16_are_named(compare, capsys):
    status, report = compare("own", "--sleep", 0.2, "--worse", steps=12)
    assert status == 0
    _, fp8 = report["variants"]
    assert fp8["time_shares"]["data loading"] > 0.5
    assert fp8["data_loading_share"] > 0.5
    assert abs(fp8["loss_difference"] - 0.01) < 0.002
    assert fp8["loss_difference"] > 3 * fp8["loss_difference_error"]
    assert report["advised"] is None
    assert "costs loss here: the loss differs by +" in report["advice"]
    printed = capsys.readouterr().out
    assert "in BF16: 4: out_features=7 is below 16" in printed
    assert "the times show nothing about a GPU" in printed
    assert not Path("out/fp8_config.json").exists()


def test_noise_is_measured_and_seeds_shift_the_programs_own(compare, capsys):
    arguments = ("--seeds", "2")
    status, report = compare("own", "--noise", steps=8, arguments=arguments)
    assert status == 0
    assert report["bf16_repeats"] is False
    assert report["noise"] is not None
    assert "The program is not deterministic: BF16 run twice differs by" in capsys.readouterr().out
    starts = [Path(f"out/{name}/rank0.jsonl").read_text().splitlines() for name in TRIALS]
    sums = [next(json.loads(x)["weights"] for x in lines if "weights" in x) for lines in starts]
    assert sums[0] == pytest.approx(sums[2], rel=1e-5)
    assert sums[1] == pytest.approx(sums[3], rel=1e-5)
    assert sums[0] != pytest.approx(sums[1], rel=1e-3)


def test_a_failure_in_bf16_is_not_fp8s_fault(compare, capsys):
    status, report = compare("failing")
    assert status == 1
    assert "fails in BF16, so this is not FP8's fault: exit status 1 after 0" in report["advice"]
    assert "  | RuntimeError: out of luck" in capsys.readouterr().out
    assert len(report["variants"]) == 1


@pytest.mark.long
def test_a_variant_that_fails_is_a_row_and_a_second_call_continues(compare, capsys):
    """The second call runs only what failed; another command begins anew."""
    status, report = compare("own", "--fail", "fp8", steps=20)
    assert status == 1
    bf16, fp8 = report["variants"]
    assert bf16["error"] is None
    assert bf16["steps"] == 8  # its own end
    assert fp8["error"] == "exit status 1 after 8 steps (RuntimeError: out of luck)"
    began = Path("out/bf16-seed0/trial.json").stat().st_mtime_ns
    failed = Path("out/O2-seed0/trial.json").stat().st_mtime_ns
    compare("own", "--fail", "fp8", steps=20)
    assert Path("out/bf16-seed0/trial.json").stat().st_mtime_ns == began
    assert Path("out/O2-seed0/trial.json").stat().st_mtime_ns > failed
    compare("plain", steps=4)
    assert Path("out/bf16-seed0/trial.json").stat().st_mtime_ns > began


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("nothing", "it took no optimizer step. A comparison needs a command that trains"),
        ("plain", "has no Trainer, Fabric or Accelerator that we know, so FP8 would convert no"),
    ],
)
def test_a_program_that_cannot_be_compared_is_named_with_the_way_out(host, message, compare):
    status, report = compare(host)
    assert status == 1
    assert [message in variant["error"] for variant in report["variants"]] == [True]
    assert report["advice"].startswith("Nothing could be compared: ")


def test_what_a_program_writes_by_itself_is_named(compare, tmp_path):
    status, report = compare("own", "--save", "notes/losses.txt", steps=20)
    assert status == 0
    place = tmp_path / "notes"
    assert f"not redirected: the program writes losses.txt in {place} (bf16, O2)" in report["notes"]


@pytest.mark.parametrize("host", ["trainer", "transformers"])
def test_a_trial_leaves_the_users_outputs_alone(host, compare, tmp_path):
    """The program ends by itself, and saves."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights.pt").write_text("yes")
    target = mine if host == "transformers" else mine / "weights.pt"
    status, report = compare(host, "--save", target, steps=20)
    assert status == 0
    assert (mine / "weights.pt").read_text() == "yes"
    assert [path.name for path in mine.iterdir()] == ["weights.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]
    assert "trial's folder" in str(report["notes"]) or "was left out" in str(report["notes"])
    assert "not redirected" not in str(report["notes"])


@pytest.mark.parametrize("is_fast", [False, True], ids=["normal", "--fast-cpu"])
def test_bf16_products_are_torchs_own_unless_asked(is_fast, compare, monkeypatch, capsys):
    """In all variants alike, and in the report."""
    monkeypatch.setenv("TEST_BF16_PRODUCTS", "bf16")
    monkeypatch.setattr(comparison, "_is_slow", lambda: True)
    arguments = ("--no-repeat", "--fast-cpu") if is_fast else ("--no-repeat",)
    status, report = compare("own", "--steps", 2, arguments=arguments)
    assert status == 0, report
    for variant in ("bf16", "O2"):
        log = Path(f"out/{variant}-seed0/output.log").read_text()
        assert f"BF16 products in float32: {is_fast}\n" in log
    named = "BF16 products are computed in float32 and rounded once (bf16, O2)"
    assert (named in report["notes"]) == report["fast_cpu"] == is_fast
    assert (FAST_CPU in capsys.readouterr().out) == is_fast


@pytest.mark.long
def test_a_compiled_optimizer_step_is_a_step(compare):
    status, report = compare("fabric", "--compiled", steps=4)
    assert status == 0
    assert [variant["steps"] for variant in report["variants"]] == [4, 4]


@pytest.mark.long
def test_ctrl_c_ends_all_processes_and_keeps_what_was_measured(tmp_path):
    """The ranks of torchrun are in sessions of their own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program = [*launch, str(PROGRAM), "accelerate", "--steps", "100000", "--sleep", "0.2"]
    given = ["--steps", "100000", "--no-repeat", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_fp8", "compare", *given, "--", *program],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        # A shell's background jobs, such as these tests may be, ignore SIGINT, and so do children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    trial = tmp_path / "out/bf16-seed0"
    end = time.monotonic() + 400
    while not (trial / "rank1.jsonl").exists() or len(_losses(trial)) < 4:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert len(_processes_of(trial / "trial.json")) >= 3
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "0 of 2 trials are complete" in said
    assert _processes_of(trial / "trial.json") == []
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["variants"][0]["steps"] >= 4


def _losses(trial):
    lines = (trial / "rank0.jsonl").read_text().splitlines(keepends=True)
    return [line for line in lines if '"loss"' in line and line.endswith("\n")]

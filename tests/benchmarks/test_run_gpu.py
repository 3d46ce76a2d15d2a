"""The one benchmark command, at toy size, on whatever machine this is."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "run_gpu.py")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Directory of the CSV files of one toy run."""
    directory = tmp_path_factory.mktemp("results")
    command = [*COMMAND, "--toy", "--budget", "400", "--results", str(directory)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=420, env=ENVIRONMENT, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return directory


def rows(directory, name):
    with (directory / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_every_recipe_has_a_time_for_every_linear_and_the_block(results, recipe):
    measured = [row for row in rows(results, "linear.csv") if row["variant"] == recipe]
    assert len(measured) == 8
    assert all(float(row["median_ms"]) > 0 for row in measured), measured
    *linears, block = measured
    assert block["linear"] == "block"
    total = sum(float(row["median_ms"]) for row in linears)
    assert float(block["median_ms"]) == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("recipe", ["torchao tensorwise", "torchao rowwise"])
def test_a_peer_has_a_time_or_a_reason(results, recipe):
    measured = [row for row in rows(results, "linear.csv") if row["variant"] == recipe]
    assert len(measured) == 8
    assert all(row["median_ms"] or row["note"] for row in measured)


def test_step_runs_fp8_linears_under_fp8_mixed_only(results):
    measured = {row["precision"]: row for row in rows(results, "step.csv")}
    assert set(measured) == {"bf16-mixed", "fp8-mixed"}
    assert measured["bf16-mixed"]["fp8_linears"] == "0"
    assert measured["fp8-mixed"]["fp8_linears"] == "14"
    assert all(float(row["median_ms"]) > 0 for row in measured.values())
    losses = [float(row["loss"]) for row in measured.values()]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_optimizer_counts_the_bytes_of_each_variant(results):
    """Read and written: weights and states; read: gradients.

    Of the toy model 4.57 % are norms and projections under 4096 elements, which stay FP32.
    """
    measured = {row["variant"]: row for row in rows(results, "optimizer.csv")}
    assert all(float(row["median_ms"]) > 0 for row in measured.values()), measured
    weight, moments, grad, scales = 2 * 2, 2 * 2, 2, 2 * 2 / 32
    large = {
        "fp8, 8 residual bits": weight + 2 + grad + moments + scales,
        "fp8, 4 residual bits": weight + 1 + grad + moments + scales,
        "fp8, no residual": weight + grad + moments + scales,
        "fp8, 8 residual bits, 8-bit gradients": weight + 2 + 1 + 1 / 32 + moments + scales,
        "fp8, 8 residual bits, update clipping": weight + 2 + grad + moments + scales,
    }
    small = 2 * 4 + 4 + 2 * 8
    moved = {
        name: float(row["bytes_per_parameter"]) for name, row in measured.items() if name != "copy"
    }
    assert moved.pop("torch AdamW, fp32") == small
    assert moved == {
        name: pytest.approx(0.9543 * value + 0.0457 * small, rel=1e-3)
        for name, value in large.items()
    }
    assert measured["copy"]["copy_share"] == "1.0"
    assert measured["torch AdamW, fp32"]["speedup"] == "1.0"


@pytest.mark.parametrize("name", ["linear.csv", "step.csv", "optimizer.csv", "gpu_run.csv"])
def test_rows_say_where_they_come_from(results, name):
    for row in rows(results, name):
        assert row["torch"] == torch.__version__
        for column in ("gpu", "driver", "triton", "commit", "date", "command"):
            assert row[column], column


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_full_size_is_refused():
    run = subprocess.run(COMMAND, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert run.returncode == 2
    assert "--toy" in run.stderr

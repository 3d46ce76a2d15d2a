"""No lost updates: what is recorded, and a smaller run measured."""

import csv

import pytest
import torch

from benchmarks.evidence import updates as bench
from benchmarks.rows import RESULTS


def _recorded():
    with (RESULTS / "updates.csv").open() as file:
        return {(row["store"], float(row["lr"])): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("lr", bench.RATES)
@pytest.mark.parametrize("store", bench.TARGETS)
def test_recorded_runs_meet_their_targets(store, lr):
    row = _recorded()[store, lr]
    cosine, norm = bench.TARGETS[store]
    assert int(row["steps"]) == 2000
    assert float(row["cosine"]) >= cosine
    assert abs(float(row["norm_ratio"]) - 1) <= norm


def test_recorded_masters_without_residual_show_why():
    recorded = _recorded()
    assert set(recorded) == {(store, lr) for store in bench.STORES for lr in bench.RATES}
    assert float(recorded["bf16_nearest", 1e-6]["projection"]) < 0.01
    assert float(recorded["fp16_nearest", 1e-6]["projection"]) < 0.1


@pytest.mark.slow
def test_a_smaller_matrix_meets_the_targets():
    """All 2,000 steps, of 64 x 64 weights; O2 is O3 with a finer gradient."""
    stores = ["residual_8", "o3_8", "bf16_nearest"]
    rows = {row["store"]: row for row in bench.measure(stores, 1e-6, bench.STEPS, size=64)}
    for store in stores[:2]:
        cosine, norm = bench.TARGETS[store]
        assert float(rows[store]["cosine"]) >= cosine
        assert abs(float(rows[store]["norm_ratio"]) - 1) <= norm
    assert float(rows["bf16_nearest"]["projection"]) < 0.02


@pytest.mark.parametrize("store", ["o2_8", "o2_0", "o3_8"])
def test_the_packages_step_is_the_plain_one_of_the_comparison(store):
    """Written twice, equal bit for bit."""
    runs = [run(bench.STORES[store], bench.Regression(64, 64).start) for run in _RUNS]
    for step in range(1, 21):
        gradient = 0.1 * torch.randn(64, 64)
        for run in runs:
            run.step(gradient, 1e-4, step)
        assert torch.equal(runs[0].merged(), runs[1].merged())


_RUNS = (bench.LevelRun, bench.PlainRun)

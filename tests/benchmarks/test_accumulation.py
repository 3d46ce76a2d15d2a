"""Gradients summed over micro-batches in 8 bits: what is recorded, and a part of it measured."""

import csv

import pytest
import torch

from benchmarks import accumulation as bench
from benchmarks.rows import RESULTS
from torch_fp8.ops.grad_codec import Rounding
from torch_fp8.tensor.float8_grad import Float8Grad


def _recorded():
    with (RESULTS / "accumulation.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {(r["method"], r["input"], int(r["micro_batches"])): r for r in rows}


@pytest.mark.parametrize("input_name", bench.INPUTS)
def test_recorded_sums_of_64_micro_batches_meet_the_target(input_name):
    recorded = _recorded()
    assert set(recorded) == {
        (m, i, n) for m in bench.METHODS for i in bench.INPUTS for n in bench.MICRO_BATCHES
    }
    for count in bench.MICRO_BATCHES:
        assert float(recorded[bench.PRODUCT, input_name, count]["error"]) <= bench.TARGET


@pytest.mark.parametrize("input_name", bench.INPUTS)
def test_recorded_sums_are_unbiased_in_the_mean(input_name):
    """Within the noise of 512 streams, which is below 0.01 %."""
    recorded = _recorded()
    for count in bench.MICRO_BATCHES:
        row = recorded[bench.PRODUCT, input_name, count]
        projection, deviation = float(row["projection"]), float(row["deviation"])
        assert 0 < deviation <= 1e-4
        assert abs(projection) <= 3 * deviation
        assert float(row["bias"]) <= 0.015 * float(row["error"])  # as far as it is known
        assert abs(float(row["kept_small"]) - 1) <= 3e-4


def test_recorded_losers_show_why():
    recorded = _recorded()

    def figure(method, input_name, column):
        return float(recorded[method, input_name, 64][column])

    assert figure("e3m4_nearest", "coherent", "kept_small") < 0.75
    for method in ("e3m4_stochastic", "e4m3_stochastic", "e4m3_antithetic"):
        assert figure(method, "independent", "error") > bench.TARGET
    for method in ("e3m4_antithetic", "tapered_antithetic"):
        bias, deviation = (figure(method, "outlier", c) for c in ("projection", "deviation"))
        assert bias < -10 * deviation
    small = figure("e3m4_stochastic", "outlier", "error_small")
    assert figure(bench.PRODUCT, "outlier", "error_small") < 1.1 * small
    for method in ("tapered_5_4", "tapered_5_5_4", "tapered_5_5_4_4_3", "e2m5"):
        assert figure(f"{method}_stochastic", "outlier", "error_small") > 1.8 * small


@pytest.mark.parametrize("input_name", bench.INPUTS)
def test_the_recorded_figures_are_those_of_this_code(input_name):
    recorded = _recorded()
    for row in bench.measure(bench.PRODUCT, input_name, streams=2):
        was = recorded[bench.PRODUCT, input_name, row["micro_batches"]]
        assert row["error"] == pytest.approx(float(was["error"]), rel=0.04)
        assert abs(row["projection"]) <= 4 * 16 * float(was["deviation"])


def test_the_measured_sum_is_the_packages():
    """Bit for bit, though written twice."""
    gradients = bench.independent(9).bfloat16()
    expected = bench.accumulate(gradients.float(), bench.METHODS[bench.PRODUCT], seed=5)
    grad = None
    for gradient, total in zip(gradients, expected, strict=True):
        if grad is None:
            grad = Float8Grad.quantize(gradient, Rounding(lambda: (5,)))
        else:
            grad.add_(gradient)  # as autograd does
        assert torch.equal(grad.dequantize(torch.float32), total)

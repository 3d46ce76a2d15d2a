"""Gradients summed over micro-batches in 8 bits: what is recorded, and a part of it measured."""

import csv

import pytest
import torch

from benchmarks import accumulation as bench
from torch_fp8.gradient_parts import Rounding
from torch_fp8.gradients import Float8Grad


def _recorded():
    with bench.RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    return {(r["method"], r["input"], int(r["micro_batches"])): r for r in rows}


@pytest.mark.parametrize("input_name", bench.INPUTS)
def test_recorded_sums_of_64_micro_batches_meet_the_target(input_name):
    recorded = _recorded()
    assert set(recorded) == {
        (m, i, n) for m in bench.METHODS for i in bench.INPUTS for n in bench.MICRO_BATCHES
    }
    for count in bench.MICRO_BATCHES:
        row = recorded[bench.PRODUCT, input_name, count]
        assert float(row["error"]) <= bench.TARGET
        assert float(row["bias"]) <= 0.006  # a part in thirteen of what noise there is
        assert abs(float(row["projection"])) <= 0.004
        assert float(row["kept_small"]) >= 0.996


def test_recorded_losers_show_why():
    recorded = _recorded()
    assert float(recorded["e3m4_nearest", "coherent", 64]["kept_small"]) < 0.75
    assert float(recorded["e3m4_stochastic", "independent", 64]["error"]) > bench.TARGET
    assert float(recorded["e4m3_antithetic", "independent", 64]["error"]) > bench.TARGET


@pytest.mark.parametrize("input_name", bench.INPUTS)
def test_the_recorded_figures_are_those_of_this_code(input_name):
    recorded = _recorded()
    for row in bench.measure(bench.PRODUCT, input_name, seeds=2):
        was = recorded[bench.PRODUCT, input_name, row["micro_batches"]]
        assert row["error"] == pytest.approx(float(was["error"]), rel=0.04)
        assert abs(row["projection"]) <= 0.005


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

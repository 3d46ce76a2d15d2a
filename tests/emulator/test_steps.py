"""Whole training steps and decoding through the code that a card would run, emulated."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.emulator.scaled_gemm import exact_product, scaled_mm
from tests.emulator.step_cases import CASES
from tests.internals import CastOptions
from tests.processes import ran
from torch_fp8.ops.gemm_operand import operand
from torch_fp8.ops.quantize import quantize_2d
from torch_fp8.ops.scaled_mm import QuantizedTensor, lay_out

ROOT = Path(__file__).resolve().parents[2]
EXACT, NOISE = 2e-6, 0.2
"""Distances of gradients: of float32 sums in another order, and of FP8 values that these move."""
ALONE = ("llama", "gpt2")
"""Models whose norms are not fused at O1: no sum's order moves an FP8 value in the first step."""


def distances(*cases, module="steps"):
    done = ran(sys.executable, "-m", f"tests.emulator.{module}", *cases, cwd=ROOT)
    return json.loads(done.stdout)


def assert_as_near_as_promised(row):
    """Each call equals its reference; what the steps add up to differs by FP8's noise."""
    assert row["calls"]
    assert row["unequal calls"] == 0
    assert row["loss"] < 1e-3
    alone = row["level"] == "O1" and row["model"] in ALONE
    assert row["first grad"] < (EXACT if alone else NOISE)


@pytest.mark.long
def test_steps_of_two_recipes():
    rows = distances("tensorwise O1", "blockwise O3")
    for row in rows.values():
        assert_as_near_as_promised(row)
    assert rows["tensorwise O1"]["loss"] == 0
    assert rows["tensorwise O1"]["launches"] > 200
    assert rows["blockwise O3"]["kernels"] >= 9


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_model_recipe_level_and_option(case):
    assert_as_near_as_promised(distances(case)[case])


def quantized(shape, granularity, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    options = CastOptions(torch.float8_e4m3fn, granularity, True, True, False)
    qdata, scale, *_ = quantize_2d(x, options)
    return QuantizedTensor(qdata, scale, granularity)


def arguments(a, b, dtype=torch.bfloat16, bias=None):
    """Arguments of the operator, as `torch_fp8.ops.scaled_mm` makes them."""
    kinds = {"tensorwise": 0, "rowwise": 1, "block_1x32": 3, "block_1x128": 4, "block_128x128": 5}
    swizzle = [1 if a.granularity == "block_1x32" else 0]
    laid_out = lay_out(b, b.qdata.shape[1])
    left = operand(a, a.qdata.shape[1], is_b=False)
    right, scales, kind = laid_out.arguments
    mine = [kinds[a.granularity]]
    return [left.qdata, right, [left.scale], mine, swizzle, scales, kind, swizzle, bias, dtype]


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        *(("tensorwise",) * 2, ("rowwise",) * 2, ("block_1x32",) * 2, ("block_1x128",) * 2),
        *(("block_1x128", "block_128x128"), ("block_128x128", "block_1x128")),
    ],
)
def test_laid_out_operands_give_the_product(of_a, of_b):
    a, b = quantized((40, 272), of_a, 0), quantized((136, 272), of_b, 1)
    product = scaled_mm(*arguments(a, b))[:40, :136]
    want = exact_product(a, b, torch.bfloat16, False, None)
    assert torch.equal(product, want)

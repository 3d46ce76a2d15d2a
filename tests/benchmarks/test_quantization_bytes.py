"""Bytes and launches of quantization in a linear layer: the targets, counted as they run."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json
from benchmarks.evidence.quantization_bytes import CASES, applies, rows
wanted = {named}
made = [row for recipe in {recipes} for case in CASES
        if case.name in wanted and applies(recipe, case) for row in rows(recipe, case)]
print(json.dumps(made))
"""
CASES = [
    "training",
    "training, user's optimizer",
    "training, bias",
    "training, frozen weight",
    "micro-batch, payload cache",
    "micro-batch, both payloads cached",
    "optimizer step, payload cache",
    "optimizer step, both payloads cached",
    "amax given",
]


def _run(python, script):
    """A process of its own: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [python, "-c", script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counted(forked_interpreter):
    """(recipe, case, tensor) -> its row."""
    recipes = ("tensorwise", "delayed", "blockwise")
    rows = _run(forked_interpreter, SCRIPT.format(named=CASES, recipes=recipes))
    return {(row["recipe"], row["case"], row["tensor"]): row for row in rows}


@pytest.mark.parametrize("tensor", ["input", "gradient"])
@pytest.mark.parametrize(
    ("recipe", "most"), [("delayed", 4.1), ("blockwise", 4.1), ("tensorwise", 6.1)]
)
def test_input_and_gradient(counted, recipe, most, tensor):
    row = counted[recipe, "training", tensor]
    assert most - 0.11 < float(row["bytes_per_element"]) <= most  # and both layouts were made


def test_a_given_amax_saves_a_read(counted):
    row = counted["tensorwise", "amax given", "input"]
    assert 4 <= float(row["bytes_per_element"]) <= 4.1


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "tensorwise"])
def test_weight_without_payload_cache(counted, recipe):
    assert 6 <= float(counted[recipe, "training", "weight"]["bytes_per_element"]) <= 6.05


def test_weight_that_is_not_ours_to_watch(counted):
    row = counted["tensorwise", "training, user's optimizer", "weight"]
    assert 8 <= float(row["bytes_per_element"]) <= 8.05


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize(
    ("cached", "at_the_step", "per_micro_batch"),
    [("payload cache", 1, 2), ("both payloads cached", 2, 0)],
)
def test_weight_with_payload_cache(counted, recipe, cached, at_the_step, per_micro_batch):
    """The step writes codes alone: no read of a weight, and no launch for each of them."""
    step = counted[recipe, f"optimizer step, {cached}", "weight"]
    assert float(step["bytes_per_element"]) == pytest.approx(at_the_step, abs=0.01)
    assert step["kernels"] == (2 if recipe == "tensorwise" else 1)
    micro_batch = counted.get((recipe, f"micro-batch, {cached}", "weight"))
    found = 0 if micro_batch is None else float(micro_batch["bytes_per_element"])
    assert found == pytest.approx(per_micro_batch, abs=0.01)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_a_kept_weight_takes_no_launch(counted, recipe):
    launched = counted[recipe, "micro-batch, both payloads cached", "all"]
    casts = 2 if recipe == "blockwise" else 4
    assert (launched["gemms"], launched["kernels"], launched["torch_operators"]) == (3, casts, 0)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_three_gemms_and_four_launches(counted, recipe):
    row = counted[recipe, "training", "all"]
    assert (row["gemms"], row["kernels"], row["torch_operators"]) == (3, 4, 0)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_bias_is_one_launch_and_no_read_of_the_output_or_the_gradient(counted, recipe):
    without, row = (counted[recipe, case, "all"] for case in ("training", "training, bias"))
    assert row["kernels"] == without["kernels"] + 1
    assert row["torch_operators"] == 0
    plain, summed = (
        float(counted[recipe, case, "gradient"]["bytes_per_element"])
        for case in ("training", "training, bias")
    )
    assert summed <= plain + 0.07


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "tensorwise"])
def test_a_frozen_weight_needs_one_layout(counted, recipe):
    full, frozen = (
        float(counted[recipe, case, "input"]["bytes_per_element"])
        for case in ("training", "training, frozen weight")
    )
    assert full - frozen == pytest.approx(1, abs=0.04)  # the other layout, and its scales


def test_the_count_is_of_what_runs(forked_interpreter):
    """What programs read that run at once is read once, and again by later ones; masks; L2."""
    counts = _run(
        forked_interpreter,
        """
from benchmarks.evidence.launches import AT_ONCE, count_launches
import json, torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, small_ptr, size, far, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size) + tl.load(x_ptr + i, mask=i < size - 1)
    if far:
        x += tl.load(x_ptr + i - far, mask=(i >= far) & (i < size), other=0.0)
    tl.store(y_ptr + i, x + tl.load(small_ptr), mask=i < size)

x, y, small = torch.randn(100_003), torch.empty(100_003), torch.ones(4)
def run():
    kernel[(25,)](x, y, small, x.numel(), 0, BLOCK=4096)
    kernel[(391,)](x, y, small, x.numel(), AT_ONCE * 256, BLOCK=256)
    y.mul_(2)
    y.view(-1).t().detach()
    torch.empty_like(y)
launches = count_launches(run, x=x)
counts = [[k.kind, k.name, k.sources, k.moved, k.requested] for k in launches]
print(json.dumps([AT_ONCE, counts]))
""",
    )
    at_once, counts = counts
    size = 100_003
    again = size - at_once * 256
    moved, requested = 2 * size * 4, (3 * size - 1) * 4
    assert counts == [
        ["kernel", "kernel", ["x"], moved + 4, requested + 25 * 4],
        ["kernel", "kernel", ["x"], moved + again * 4 + 4, requested + again * 4 + 391 * 4],
        ["torch", "aten::mul_", ["x"], 2 * 4 * size, 2 * 4 * size],
    ]

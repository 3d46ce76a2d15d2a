"""Bytes that quantization adds to a whole block, counted as they run."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
SCRIPT = f"""
import json
from benchmarks.evidence import block_bytes as block
block.TOKENS = 256  # two bands of the coarsest scales: the interpreter takes a minute for 512
rows = [row for recipe in {RECIPES} for row in block.rows(recipe)]
launches = block.count("delayed")
others = sorted({{k.name for k in launches if k.kind == "torch" and not k.within}})
parts = {{name: (p.numel, p.in_bf16) for name, p in block.parts().items()}}
print(json.dumps([rows, others, parts]))
"""


@pytest.fixture(scope="module")
def run(forked_interpreter):
    """A process of its own: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [forked_interpreter, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def counted(run):
    """(recipe, tensor) -> its row."""
    return {(row["recipe"], row["tensor"]): row for row in run[0]}


def _added(counted, recipe, tensor):
    return float(counted[recipe, tensor]["bytes_per_element"])


def test_bf16_reads_and_writes_everything_once(run):
    for name, least in (
        ("input of q, k, v", 4 + 6),  # x and y; the gradients of both, and x
        ("input of gate, up", 4 + 6),
        ("input of down", 6),
        ("gradients of gate, up", 10 / 2),
        ("input of o", 0),
        ("gradient of down", 0),
    ):
        numel, in_bf16 = run[2][name]
        # Norms: and the parts of the weight's gradient, rows of which 512 tokens are no more.
        assert (
            least <= in_bf16 / numel <= least + (2.2 if "q" in name or "input of g" in name else 0)
        )


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [
        ("tensorwise", 2, 2.1),  # x again, once the amax is known
        ("delayed", 0, 0.4),  # one launch
        ("blockwise", 2, 2.2),  # bands of 128 rows of 4,096 features do not stay in the cache
        ("mxfp8", 0, 0.4),  # one launch; scales of groups of 32
    ],
)
@pytest.mark.parametrize("tensor", ["input of q, k, v", "input of gate, up"])
def test_norms(counted, recipe, least, most, tensor):
    assert least <= _added(counted, recipe, tensor) <= most


@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("tensorwise", 6.1),
        ("delayed", 4.01),  # with the slots of amaxes
        ("blockwise", 4.1),
        ("mxfp8", 4.3),
    ],
)
def test_what_comes_from_no_producer(counted, recipe, most):
    others = ("input of o", "gradients of q, k, v", "gradient of o", "gradient of down")
    for tensor in others:
        assert most - 0.4 < _added(counted, recipe, tensor) <= most, tensor


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_products_add_scales_alone(counted, recipe):
    """What is kept in FP8 is written in forward, and half of BF16's bytes are read in backward."""
    product = _added(counted, recipe, "input of down")
    gradient = _added(counted, recipe, "gradients of gate, up")
    assert 2 <= product <= 2.4
    assert -1 <= gradient <= -0.6
    assert 0 <= product + 2 * gradient <= 1


def test_blocks_of_both_gradients_of_a_product_are_cast_one_by_one(counted):
    """Registers do not hold 128 rows of both: they are written and read in BF16."""
    assert 2 <= _added(counted, "blockwise", "input of down") <= 2.4
    assert 3 <= _added(counted, "blockwise", "gradients of gate, up") <= 3.2
    launched = counted["blockwise", "gradients of gate, up"]["launched"]
    assert launched == "swiglu_backward_kernel quantize_blocks_kernel quantize_blocks_kernel"


def test_launches(counted):
    swiglu = ["swiglu_cast_kernel", "swiglu_backward_cast_kernel"]
    assert counted["blockwise", "input of down"]["launched"] == swiglu[0]
    assert counted["mxfp8", "input of q, k, v"]["launched"].startswith("norm_cast_once_kernel ")
    for tensor, kernel in (
        ("input of q, k, v", "norm_cast_once_kernel norm_backward_kernel"),
        ("input of gate, up", "norm_cast_once_kernel norm_backward_kernel"),
        ("input of down", swiglu[0]),
        ("gradients of gate, up", swiglu[1]),
        ("gradients of q, k, v", "cast_kernel cast_kernel cast_kernel"),
    ):
        assert counted["delayed", tensor]["launched"].removesuffix(" aten::sum") == kernel


def test_torch_launches_beside_our_operators_are_those_of_bf16(run):
    attention = {f"aten::_scaled_dot_product_flash_attention_for_cpu{x}" for x in ("", "_backward")}
    rotary = {"aten::neg", "aten::cat", "aten::mul", "aten::add", "aten::slice_backward"}
    sums = {"aten::add", "aten::add_"}  # residuals, and gradients of what several layers read
    layout_and_dtype = {"aten::clone", "aten::_to_copy"}  # of attention; of norms' weight gradients
    slots = {"aten::maximum"}  # of the others that read what one of them has cast
    assert set(run[1]) <= attention | rotary | sums | layout_and_dtype | slots

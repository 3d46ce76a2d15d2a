"""The kernels of RMSNorm and SwiGLU on a card; what is compared with what: see `producers`."""

import pytest
import torch

from tests.internals import CastOptions, NormWithRstd
from tests.kernel_cases import producers
from tests.kernel_cases.producers import BF16, E4M3, KINDS, OPS, SHAPES
from torch_fp8.ops import rms_norm

pytestmark = pytest.mark.gpu
ONCE = (
    ((8192, 4096), "tensorwise"),
    ((33792, 512), "block_1x128"),
    ((33792, 512), "block_128x128"),
    ((8192, 512), "block_1x32"),
    ((64, 512), "block_1x128"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_its_casts(shape, kind):
    producers.check_norm(OPS, "cuda", shape, kind)


@pytest.mark.parametrize(("shape", "granularity"), ONCE, ids=str)
def test_once_equals_two_launches(shape, granularity):
    producers.check_norm_once(OPS, "cuda", shape, granularity)


@pytest.mark.parametrize("shape", [(17, 272), (1, 4096), (128, 128), (512, 272)], ids=str)
def test_amax_that_is_found_equals_the_one_that_is_given(shape):
    producers.check_norm_once(OPS, "cuda", shape, "tensorwise", finds_amax=True)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_backward(shape, saved):
    producers.check_norm_backward(OPS, "cuda", shape, saved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_and_its_casts(shape, smooth, kind):
    producers.check_swiglu(OPS, "cuda", shape, kind, smooth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_smoothing(shape, kind):
    producers.check_smoothing(OPS, "cuda", shape, kind)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_backward_and_its_casts(shape, saved):
    producers.check_swiglu_backward(OPS, "cuda", shape, saved)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_gradient_of_gate_and_up_and_its_casts(shape, gate_first):
    producers.check_gate_up(OPS, "cuda", shape, gate_first)


def test_more_than_2_to_the_31_elements():
    rows, cols = 2**17 + 16, 2**14
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.fail("needs 16 GiB of free device memory")
    x = torch.zeros(rows, cols, dtype=BF16, device="cuda")
    x[-1, -1] = 1.0
    weight, rstd = torch.ones(cols, device="cuda"), torch.ones(rows, device="cuda")
    scale = torch.ones((), device="cuda")
    options = CastOptions(E4M3, "tensorwise", False, True, True, scale)
    row, _, col, _ = rms_norm.rms_norm_quantize(NormWithRstd(x, weight, rstd, 0.0, BF16), options)
    assert row[-1, -1].float() == col[-1, -1].float() == 1.0
    assert int(row[:-1].view(torch.uint8).count_nonzero()) == 0

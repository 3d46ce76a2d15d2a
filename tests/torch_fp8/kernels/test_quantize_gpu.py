import pytest
import torch

from tests.internals import CastOptions
from tests.kernel_cases import casts
from tests.kernel_cases.comparison import same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernel():
    return casts.kernel()


@pytest.mark.parametrize("kind", casts.KINDS)
@pytest.mark.parametrize("granularity", casts.GRANULARITIES)
def test_kernel_equals_reference_bit_for_bit(kernel, granularity, kind):
    casts.check_cast(kernel, "cuda", granularity, kind)


@pytest.mark.parametrize("kind", casts.KINDS)
def test_known_scale_and_amax_equal_reference(kernel, kind):
    casts.check_known_scale(kernel, "cuda", kind, (*casts.SHAPES, (2048, 4096)))


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "block_1x128"])
def test_sums_are_right_and_repeat(granularity):
    casts.check_sums("cuda", granularity)


def test_casts_beside_transposes():
    casts.check_beside(casts.beside_kernel(), "cuda")


def test_weights_are_cast_side_by_side():
    casts.check_side_by_side(casts.side_by_side_kernel(), "cuda")


def test_bytes_are_transposed():
    casts.check_transpose(casts.transpose_kernel(), "cuda", (*casts.SHAPES, (4096, 14336)))


@pytest.mark.parametrize("granularity", casts.GRANULARITIES)
def test_any_strides(kernel, granularity):
    casts.check_strides(kernel, "cuda", granularity)


def test_more_than_2_to_the_31_elements(kernel):
    rows, cols = 2**17 + 1, 2**14
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.fail("needs 12 GiB of free device memory")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 448.0
    one = torch.ones((), device="cuda")
    options = CastOptions(torch.float8_e4m3fn, "tensorwise", False, True, True, scale=one)
    row, _, col, _ = kernel(x, options)
    assert row[-1, -1].float().item() == 448.0
    assert col[-1, rows - 1].float().item() == 448.0
    assert int(row[:-1].view(torch.uint8).count_nonzero()) == 0


def test_operator_runs_the_kernel_and_equals_its_cpu_twin():
    x = casts.matrix("row spread", (200, 333), torch.bfloat16)
    options = CastOptions(torch.float8_e4m3fn, "block_1x128", False, True, True)
    want = torch.ops.torch_fp8.quantize_2d(x, *options)
    made = torch.ops.torch_fp8.quantize_2d(x.to("cuda"), *options)
    for got, expected in zip(made, want, strict=True):
        same_bits(got, expected, "torch_fp8::quantize_2d")

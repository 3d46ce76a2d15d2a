"""The cast kernels on a card: bytes and scales equal to the reference on the CPU."""

import itertools

import pytest
import torch

from torch_fp8.formats import format_of
from torch_fp8.quantize import laid_out, quantize_2d_reference
from torch_fp8.scaling import scale_from_amax, tensor_amax

pytestmark = pytest.mark.gpu

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
SHAPES = ((1, 1), (37, 131), (129, 4096), (512, 272), (3, 20000), (0, 48))
CHOICES = ((torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.float8_e5m2, False))
BOTH = ((True, True),)
EACH = ((True, True), (True, False), (False, True))
KINDS = (
    "gaussian",
    "row spread",
    "zeros",
    "denormal",
    "tiny",
    "huge",
    "inf",
    "nan",
    "range",
    "boundaries",
)


def matrix(kind, shape, dtype):
    """Rows of every size, edges of float32, and values on the rounding boundaries of FP8."""
    generator = torch.Generator().manual_seed(
        KINDS.index(kind) * 1000 + SHAPES.index(shape) if shape in SHAPES else 1
    )
    x = torch.randn(shape, generator=generator)
    if kind == "row spread":
        x *= 2.0 ** torch.randint(-8, 9, (shape[0], 1), generator=generator)
    elif kind == "zeros":
        x[:, : shape[1] // 2] = 0
        x[: shape[0] // 3] = -0.0
    elif kind == "denormal":
        x *= 1e-40
    elif kind == "tiny":
        x *= 1e-33
    elif kind == "huge":
        x *= 1e37
    elif kind == "range":  # quotients that underflow float32
        x *= 10.0 ** torch.randint(-40, 38, shape, generator=generator)
    elif kind in ("inf", "nan") and x.numel():
        x[-1, -1] = float(kind)
    elif kind == "boundaries":
        steps = torch.randint(-480, 481, shape, generator=generator) / 16.0
        x = steps * 2.0 ** torch.randint(-6, 4, shape, generator=generator)
        if x.numel():
            x[..., 0], x[0] = 448.0, 448.0
    return x.to(dtype)


def reference(x, scale, dtype, granularity, power_of_two, row, col):
    if granularity == "tensorwise" and scale is None:
        scale = scale_from_amax(tensor_amax(x), format_of(dtype), power_of_two)
    power_of_two = power_of_two or granularity == "block_1x32"
    made = quantize_2d_reference(x, scale, dtype, granularity, power_of_two, row, col)
    made = list(laid_out(made, granularity))
    if granularity == "tensorwise":
        made[1] = made[3] = scale
    return made


def assert_same(got, want):
    """Same shape and bits; NaN equals NaN, which one is the platform's choice."""
    got = got.cpu()
    assert got.shape == want.shape
    assert got.is_contiguous() == want.is_contiguous()
    if got.ndim == 2:
        assert got.t().is_contiguous() == want.t().is_contiguous()
    integer = torch.uint8 if want.dtype.itemsize == 1 else torch.int32
    same = got.view(integer) == want.view(integer)
    same |= got.float().isnan() & want.float().isnan()
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_kernel_equals_reference_bit_for_bit(granularity, kind):
    from torch_fp8.kernels.quantize import quantize_2d

    # Every type and both single layouts for one shape: each combination is a compilation.
    for shape, source in [(s, torch.bfloat16) for s in SHAPES] + [
        ((129, 4096), torch.float16),
        ((129, 4096), torch.float32),
    ]:
        x = matrix(kind, shape, source)
        layouts = EACH if source == torch.bfloat16 and shape == (129, 4096) else BOTH
        for dtype, power_of_two in CHOICES:
            want = reference(x, None, dtype, granularity, power_of_two, True, True)
            for row, col in layouts:
                made = quantize_2d(x.cuda(), None, dtype, granularity, power_of_two, row, col)
                for got, expected, wanted in zip(made, want, (row, row, col, col), strict=True):
                    if wanted:
                        assert_same(got, expected)
                    else:
                        assert got is None


@pytest.mark.parametrize("kind", KINDS)
def test_known_scale_and_amax_equal_reference(kind):
    from torch_fp8.kernels.quantize import quantize_2d

    for shape, dtype, value in itertools.product(SHAPES, FORMATS, (0.37, 2.0**-100)):
        x, scale = matrix(kind, shape, torch.bfloat16), torch.tensor(value)
        want = reference(x, scale, dtype, "tensorwise", False, True, True)
        made = quantize_2d(x.cuda(), scale.cuda(), dtype, "tensorwise", False, True, True)
        assert_same(made[0], want[0])
        assert_same(made[2], want[2])
        amax = tensor_amax(x)
        want = reference(x, None, dtype, "tensorwise", False, True, True)
        made = quantize_2d(x.cuda(), None, dtype, "tensorwise", False, True, True, amax.cuda())
        for got, expected in zip(made, want, strict=True):
            assert_same(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_delayed_scaling_equals_reference(kind):
    """Payloads, scales and histories, over steps; a grid of many programs that end in any order."""
    from torch_fp8.delayed_scaling import quantize_2d_delayed_reference
    from torch_fp8.kernels.delayed_scaling import quantize_2d_delayed

    for shape, dtype, algorithm in itertools.product(
        (*SHAPES, (2048, 4096)), FORMATS, ("max", "most_recent")
    ):
        theirs, last = torch.zeros(40), torch.ones(())
        ours, our_last = theirs.cuda(), last.cuda()
        progress = torch.zeros(2, dtype=torch.int32, device="cuda")
        for step in range(4):
            x = matrix(kind, shape, torch.bfloat16) * 2.0**step
            if x.numel() == 0:
                continue
            how = (dtype, algorithm, 0, True, True)
            want = quantize_2d_delayed_reference(x, theirs, progress, last, *how, None)
            made = quantize_2d_delayed(x.cuda(), ours, progress, our_last, *how)
            for got, expected in zip(made, want[:3], strict=True):
                assert_same(got, expected)
            assert_same(ours, theirs)
            assert_same(our_last, last)
            assert not progress.any()


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "block_1x128"])
def test_sums_are_right_and_repeat(granularity):
    from torch_fp8.kernels.quantize import quantize_2d
    from torch_fp8.kernels.sums import TileSums

    x = matrix("row spread", (5000, 1040), torch.bfloat16)
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    made = []
    for _ in range(2):
        sums = TileSums()
        quantize_2d(x.cuda(), None, FORMATS[0], granularity, False, True, True, None, sums)
        made.append(sums.total(x.cuda(), torch.float32).cpu())
    assert torch.equal(*made)
    assert ((made[0] - exact).abs() <= size * 5000 * 2.0**-24).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_any_strides(granularity):
    from torch_fp8.kernels.quantize import quantize_2d

    base = matrix("row spread", (300, 520), torch.bfloat16)
    for x in (base.t(), base[::2, 1:260], base[:, ::3], base[:1].expand(40, 520)):
        moved = base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        want = reference(x, None, torch.float8_e4m3fn, granularity, False, True, True)
        made = quantize_2d(moved, None, torch.float8_e4m3fn, granularity, False, True, True)
        for got, expected in zip(made, want, strict=True):
            assert_same(got, expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_twice_gives_the_same_bytes(granularity):
    from torch_fp8.kernels.quantize import quantize_2d

    x = matrix("row spread", (4096, 1027), torch.bfloat16).cuda()
    first, second = (
        quantize_2d(x, None, torch.float8_e5m2, granularity, False, True, True) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_more_than_2_to_the_31_elements():
    from torch_fp8.kernels.quantize import quantize_2d

    rows, cols = 2**17 + 1, 2**14
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.fail("needs 12 GiB of free device memory")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 448.0
    row, _, col, _ = quantize_2d(
        x, torch.ones((), device="cuda"), torch.float8_e4m3fn, "tensorwise", False, True, True
    )
    assert row[-1, -1].float().item() == 448.0
    assert col[-1, -1].float().item() == 448.0
    assert int(row[:-1].view(torch.uint8).count_nonzero()) == 0


def test_operator_runs_the_kernel_and_equals_its_cpu_twin():
    x = matrix("row spread", (200, 333), torch.bfloat16)
    arguments = (None, torch.float8_e4m3fn, "block_1x128", False, True, True)
    want = torch.ops.torch_fp8.quantize_2d(x, *arguments)
    made = torch.ops.torch_fp8.quantize_2d(x.cuda(), *arguments)
    for got, expected in zip(made, want, strict=True):
        assert_same(got, expected)

"""The kernels of RMSNorm and SwiGLU on a card.

Every cast equals, byte for byte, the cast of the plain result of the same card. Plain results equal
the CPU's but for what rstd, sums and exp differ by in float32: a BF16 result is the same or its
neighbour, and the same for all but one element in a hundred.
"""

import itertools

import pytest
import torch

from torch_fp8 import gate_up, producer_cast, rms_norm, swiglu, swiglu_backward
from torch_fp8.scaling import tensor_amax
from torch_fp8.swiglu_inputs import BackwardInputs

pytestmark = pytest.mark.gpu

BF16, EPS = torch.bfloat16, 1e-5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
SHAPES = ((4096, 1024), (272, 4096), (144, 14336), (37, 131), (1, 160), (129, 20000), (0, 48))
KINDS = ("gaussian", "inf", "nan", "zeros")
NEIGHBOURS = 0.01


def matrix(shape, dtype, kind="gaussian", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)
    if x.numel() and kind == "zeros":
        x[: shape[0] // 2] = 0
    elif x.numel() and kind != "gaussian":
        x[-1, -1] = float(kind)
    return x.to(dtype)


def assert_same(got, want):
    """Bits; NaN equals NaN."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert got.is_contiguous() == want.is_contiguous()
    same = (got.float() == want.float()) | (got.float().isnan() & want.float().isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


def assert_near(got, want):
    """The same or, rarely, the neighbour, but for cancellation within the row."""
    got, want, dtype = got.cpu().float(), want.float(), want.dtype
    assert bool((got.isfinite() == want.isfinite()).all())
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    if not want.numel():
        return
    size = want.abs() + want.abs().amax(-1, keepdim=True) * 2.0**-14
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 2.0**-14
    assert bool(((got - want).abs() <= step * size).all())
    if dtype != torch.float32:
        assert (got != want).float().mean() <= NEIGHBOURS + 2 / want.numel()


def casts(amax):
    """Arguments of every cast."""
    both = ((True, True), (True, False), (False, True))
    for granularity, dtype, layouts in itertools.product(GRANULARITIES, (E4M3, E5M2), both):
        power_of_two = granularity != "tensorwise"
        rest = (dtype, granularity, power_of_two, *layouts)
        if granularity == "tensorwise":
            yield (amax, None, *rest)
            yield (None, torch.full_like(amax, 0.02), *rest)
        else:
            yield (None, None, *rest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_its_casts(shape, kind):
    for dtype in (BF16, torch.float32):
        x = matrix(shape, dtype, kind)
        weight = torch.rand(shape[1]) + 0.5
        want = rms_norm.rms_norm_statistics(x, weight, EPS, 1.0, dtype, True)
        x, weight = x.cuda(), weight.cuda()
        rstd, amax, *saved = rms_norm.rms_norm_statistics(x, weight, EPS, 1.0, dtype, True)
        torch.testing.assert_close(rstd.cpu(), want[0], rtol=1e-6, atol=0, equal_nan=True)
        for got, expected in zip(saved, want[2:], strict=True):
            assert_same(got.cpu(), expected)
        y = rms_norm.rms_norm(x, weight, rstd, 1.0, dtype)
        same_rstd = rms_norm.rms_norm(x.cpu(), weight.cpu(), rstd.cpu(), 1.0, dtype)
        assert_same(y.cpu(), same_rstd)
        assert_same(amax, tensor_amax(y))
        for cast in casts(amax):
            made = rms_norm.rms_norm_quantize(x, weight, rstd, 1.0, dtype, *cast)
            for got, expected in zip(made, producer_cast.cast_result(y, *cast), strict=True):
                assert_same(got, expected)


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [
        ((8192, 4096), "tensorwise"),
        ((33792, 512), "block_1x128"),
        ((33792, 512), "block_128x128"),
        ((8192, 512), "block_1x32"),
        ((64, 512), "block_1x128"),
    ],
    ids=str,
)
def test_once_equals_two_launches(shape, granularity):
    x, weight = matrix(shape, BF16).cuda(), torch.rand(shape[1], device="cuda")
    scale = torch.tensor(0.02, device="cuda") if granularity == "tensorwise" else None
    cast = (scale, E4M3, granularity, True, True, True)
    *made, rstd, saved, saved_scale, amax = rms_norm.rms_norm_quantize_once(
        x, weight, EPS, 0.0, BF16, *cast, True
    )
    want = rms_norm.rms_norm_statistics(x, weight, EPS, 0.0, BF16, True)
    torch.testing.assert_close(rstd, want[0], rtol=1e-6, atol=0)
    assert_same(saved, want[2])
    assert_same(saved_scale, want[3])
    y = rms_norm.rms_norm(x, weight, rstd, 0.0, BF16)
    for got, expected in zip(made, producer_cast.cast_result(y, None, *cast), strict=True):
        assert_same(got, expected)
    assert_same(amax, tensor_amax(y) if scale is not None else amax.new_empty(0))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_backward(shape, saved):
    x, weight, grad = matrix(shape, BF16), torch.rand(shape[1]) + 0.5, matrix(shape, BF16, seed=1)
    rstd, _, qdata, scale = rms_norm.rms_norm_statistics(x, weight, EPS, 0.0, BF16, True)
    inputs = (qdata, scale) if saved else (x, None)
    arguments = (grad, *inputs, weight, rstd, 0.0, BF16, True)
    on_card = [t.cuda() if isinstance(t, torch.Tensor) else t for t in arguments]
    want = rms_norm.rms_norm_backward(*arguments)
    first, second = (rms_norm.rms_norm_backward(*on_card) for _ in range(2))
    assert_near(first[0], want[0])
    assert_near(first[1], want[1])
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)  # deterministic


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_and_its_casts(shape, smooth, kind):
    gate, up = matrix(shape, BF16, kind), matrix(shape, BF16, seed=1)
    factor = torch.rand(shape[1]) + 0.25 if smooth else None
    want = swiglu.swiglu(gate, up, factor)
    saved = swiglu.swiglu_save(gate, up, factor)[:4]
    gate, up, factor = (t if t is None else t.cuda() for t in (gate, up, factor))
    h = swiglu.swiglu(gate, up, factor)
    assert_near(h, want)
    *made, amax = swiglu.swiglu_save(gate, up, factor)
    for got, expected in zip(made, saved, strict=True):
        assert_same(got.cpu(), expected)
    assert_same(amax, tensor_amax(h))
    for cast in casts(amax):
        *layouts, _, _, _, _, taken = swiglu.swiglu_quantize(gate, up, factor, *cast, True)
        for got, expected in zip(layouts, producer_cast.cast_result(h, *cast), strict=True):
            assert_same(got, expected)
        assert_same(taken, amax if cast[1] is not None else amax.new_empty(0))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_backward_and_its_casts(shape, smooth, saved):
    gate, up, grad = (matrix(shape, BF16, seed=i) for i in range(3))
    factor = torch.rand(shape[1]) + 0.25 if smooth else None
    inputs = swiglu.swiglu_save(gate, up, None)[:4] if saved else (gate, None, up, None)
    arguments = BackwardInputs(grad, *inputs, factor, BF16)
    on_card = BackwardInputs(*(t.cuda() if isinstance(t, torch.Tensor) else t for t in arguments))
    gradients = swiglu_backward.swiglu_backward(on_card)
    for got, want in zip(gradients, swiglu_backward.swiglu_backward(arguments), strict=True):
        assert_near(got, want)
    amax = swiglu_backward.swiglu_backward_amax(on_card)
    assert_same(amax, torch.stack([tensor_amax(d) for d in gradients]))
    for cast in casts(amax):
        *made, taken = swiglu_backward.swiglu_backward_quantize(on_card, *cast)
        for i, d in enumerate(gradients):
            of_one = [None if t is None else t[i] for t in cast[:2]]
            want = producer_cast.cast_result(d, *of_one, *cast[2:])
            for got, expected in zip(made[4 * i : 4 * i + 4], want, strict=True):
                assert_same(got, expected)
        assert_same(taken, amax if cast[1] is not None else amax.new_empty(0))


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_gradient_of_gate_and_up_and_its_casts(shape, gate_first):
    both = matrix((shape[0], 2 * shape[1]), BF16)
    gate, up = gate_up.halves(both, gate_first)
    inputs = swiglu.swiglu_save(gate, up, None)[:4]
    arguments = (matrix(shape, BF16, seed=2), *inputs, torch.rand(shape[1]) + 0.25, BF16)
    on_card = BackwardInputs(*(t.cuda() if isinstance(t, torch.Tensor) else t for t in arguments))
    made = gate_up.gate_up_backward(on_card, gate_first)
    dgate, dup = swiglu_backward.swiglu_backward(on_card)
    assert_same(made, torch.cat([dgate, dup] if gate_first else [dup, dgate], 1))
    amax = gate_up.gate_up_backward_amax(on_card)
    assert_same(amax, tensor_amax(made))
    for cast in casts(amax):
        *layouts, taken = gate_up.gate_up_backward_quantize(on_card, gate_first, *cast)
        for got, expected in zip(layouts, producer_cast.cast_result(made, *cast), strict=True):
            assert_same(got, expected)
        assert_same(taken, amax if cast[1] is not None else amax.new_empty(0))


def delayed(y, filled):
    """Every delayed cast of a result y, with a history that is empty or of about its size."""
    amaxes = torch.zeros(1024, device="cuda")
    if filled:
        amaxes[3] = tensor_amax(y).nan_to_num(1.0, 1.0) / 2
    for dtype, algorithm, (row, col) in itertools.product(
        (E4M3, E5M2), ("max", "most_recent"), ((True, True), (True, False), (False, True))
    ):
        progress = torch.zeros(2, dtype=torch.int32, device="cuda")
        yield producer_cast.DelayedCast(amaxes, progress, dtype, algorithm, 0, row, col)


def assert_delayed(made, y, how):
    for got, expected in zip(made, how.reference(y), strict=True):
        assert_same(got, expected)
    assert not how.progress.any()


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (8192, 4096)], ids=str)
def test_delayed_casts(shape, kind, filled):
    """Without a history the last program casts everything: what it does is the same each time."""
    x, up, grad = (matrix(shape, BF16, kind, seed=i).cuda() for i in range(3))
    weight = torch.rand(shape[1], device="cuda") + 0.5
    rstd, *_ = rms_norm.rms_norm_statistics(x, weight, EPS, 0.0, BF16, False)
    y = rms_norm.rms_norm(x, weight, rstd, 0.0, BF16)
    for how in delayed(y, filled):
        made = rms_norm.rms_norm_quantize_delayed(x, weight, EPS, 0.0, BF16, how, True)
        y = rms_norm.rms_norm(x, weight, made[3], 0.0, BF16)  # its sums have an order of their own
        assert_delayed((*made[:3], made[6]), y, how)
    h, inputs = swiglu.swiglu(x, up, None), BackwardInputs(grad, x, None, up, None, None, BF16)
    for how in delayed(h, filled):
        made = swiglu.swiglu_quantize_delayed(x, up, None, how, True)
        assert_delayed((*made[:3], made[7]), h, how)
    gradients = swiglu_backward.swiglu_backward(inputs)
    casts_of_both = zip(delayed(gradients[0], filled), delayed(gradients[1], True), strict=True)
    for pair in casts_of_both:
        made = swiglu_backward.swiglu_backward_quantize_delayed(inputs, *pair)
        for i, (d, how) in enumerate(zip(gradients, pair, strict=True)):
            assert_delayed((*made[3 * i : 3 * i + 3], made[6][i]), d, how)
    both = gate_up.gate_up_backward(inputs, True)
    for how in delayed(both, filled):
        made = gate_up.gate_up_backward_quantize_delayed(inputs, True, how)
        assert_delayed(made, both, how)


def test_more_than_2_to_the_31_elements():
    rows, cols = 2**17 + 16, 2**14
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.fail("needs 16 GiB of free device memory")
    x = torch.zeros(rows, cols, dtype=BF16, device="cuda")
    x[-1, -1] = 1.0
    weight, rstd = torch.ones(cols, device="cuda"), torch.ones(rows, device="cuda")
    cast = (None, torch.ones((), device="cuda"), E4M3, "tensorwise", False, True, True)
    row, _, col, _ = rms_norm.rms_norm_quantize(x, weight, rstd, 0.0, BF16, *cast)
    assert row[-1, -1].float() == col[-1, -1].float() == 1.0
    assert int(row[:-1].view(torch.uint8).count_nonzero()) == 0

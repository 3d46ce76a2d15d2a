"""SwiGLU's backward into one gradient: the bytes of the two, side by side."""

import pytest
import torch

from tests.kernel_cases.comparison import same_bits
from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.ops import swiglu
from torch_fp8.ops import swiglu_backward as ops
from torch_fp8.quantization.formats import E4M3, E5M2

BF16 = torch.bfloat16
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
# torch's check of the schema multiplies the inputs, which FP8 on the CPU does not (torch 2.13).
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKS = {False: ("test_schema", *FP8_CHECKS), True: FP8_CHECKS}  # by whether an input is FP8
LAYOUTS = ((True, True), (True, False), (False, True))


def inputs(shape, saved, smooth=True, gate_first=True):
    """What backward takes, without `gate_first`; gate and up are halves of one tensor."""
    rows, cols = shape
    both = torch.randn(rows, 2 * cols) * 2.0 ** torch.randint(-6, 5, (rows, 1))
    gate, up = ops.halves(both.to(BF16), gate_first)
    grad = torch.randn(shape).to(BF16)
    gate_s = up_s = None
    if saved:
        gate, gate_s, up, up_s, _ = swiglu.swiglu_save(gate, up, None)
    factor = torch.rand(cols) + 0.25 if smooth else None
    return BackwardInputs(grad, gate, gate_s, up, up_s, factor, BF16)


@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_are_views(gate_first):
    both = torch.arange(24.0).view(2, 12)
    gate, up = ops.halves(both, gate_first)
    first, second = (gate, up) if gate_first else (up, gate)
    assert torch.equal(first, both[:, :6])
    assert torch.equal(second, both[:, 6:])
    assert gate.untyped_storage().data_ptr() == both.untyped_storage().data_ptr()


def test_one_scale_is_that_of_the_larger_half():
    grad = torch.ones(4, 16)
    gate, up = torch.full((4, 16), 50.0), torch.full((4, 16), 0.5)
    arguments = BackwardInputs(grad, gate, None, up, None, None, torch.float32)
    assert ops.gate_up_backward_amax(arguments) == 50  # dup is silu(gate)
    options = CastOptions(E4M3.dtype, "tensorwise", False, True, False, amax=torch.tensor(50.0))
    q, s, _, _ = ops.gate_up_backward_quantize(arguments, True, options)
    assert torch.allclose(q.float() * s, torch.tensor([[0.5] * 16 + [50.0] * 16] * 4), rtol=0.04)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_an_element_that_is_not_finite_is_seen(bad):
    arguments = inputs((40, 128), True)
    arguments.grad[5, 7] = bad
    assert not ops.gate_up_backward_amax(arguments).isfinite()
    both = ops.gate_up_backward(arguments, True)
    assert not both[5, [7, 135]].isfinite().any()
    assert both[6:].isfinite().all()


def test_scales_that_cannot_be_known_are_refused():
    arguments, one = inputs((4, 16), False), torch.ones(())
    options = CastOptions(E4M3.dtype, "tensorwise", True, True, True)
    with pytest.raises(ValueError, match="takes amax or scale"):
        ops.gate_up_backward_quantize(arguments, True, options)
    options = CastOptions(E4M3.dtype, "rowwise", True, True, True, amax=one)
    with pytest.raises(ValueError, match="made from the tensor"):
        ops.gate_up_backward_quantize(arguments, True, options)


@pytest.mark.parametrize(
    ("granularity", "layouts", "saved"),
    [
        (granularity, layouts, (i + j) % 2 == 0)  # each granularity and each pair of layouts, both
        for i, granularity in enumerate(GRANULARITIES)
        for j, layouts in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_the_operator_that_casts_is_well_formed(granularity, layouts, saved):
    arguments = inputs((20, 140), saved, smooth=layouts[0])
    cast = (E4M3.dtype, granularity, False, *layouts)
    known = ((1, 0), (0, 1)) if granularity == "tensorwise" else ((0, 0),)
    for amax, scale in known:
        scales = [torch.ones(()) if given else None for given in (amax, scale)]
        operator = torch.ops.torch_fp8.gate_up_backward_quantize.default
        given = (*arguments, saved, *cast, *scales)
        torch.library.opcheck(operator, given, test_utils=CHECKS[saved])


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("smooth", [True, False])
def test_other_operators_are_well_formed(smooth, saved):
    check, library = torch.library.opcheck, torch.ops.torch_fp8
    arguments = inputs((20, 140), saved, smooth)
    check(library.gate_up_backward.default, (*arguments, saved), test_utils=CHECKS[saved])
    check(library.gate_up_backward_amax.default, arguments, test_utils=CHECKS[saved])


def test_results_have_the_dtype_asked_for():
    *arguments, _ = inputs((20, 140), False)
    operator = torch.ops.torch_fp8.gate_up_backward.default
    assert operator(*arguments, torch.float32, True).dtype == torch.float32
    torch.library.opcheck(operator, (*arguments, torch.float32, True), test_utils=CHECKS[False])


def everything(grad, both, smooth):
    gate, up = ops.halves(both, True)
    *saved, _ = swiglu.swiglu_save(gate, up, smooth)
    arguments = BackwardInputs(grad, *saved, smooth, both.dtype)
    amax = ops.gate_up_backward_amax(arguments)
    options = CastOptions(E5M2.dtype, "tensorwise", False, True, True, amax=amax)
    made = ops.gate_up_backward_quantize(arguments, True, options)
    return *made, amax, ops.gate_up_backward(arguments, True)


@pytest.mark.long
def test_compiles_with_shapes_that_change():
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, cols in ((20, 140), (33, 129)):
        arguments = torch.randn(rows, cols), torch.randn(rows, 2 * cols), torch.rand(cols)
        for a, b in zip(compiled(*arguments), everything(*arguments), strict=True):
            same_bits(a, b)

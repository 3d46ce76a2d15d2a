import functools

import pytest
import torch

from tests.internals import BackwardInputs, CastOptions, NormBackwardInputs, NormInputs
from tests.kernel_cases.casts import EACH, GRANULARITIES
from tests.kernel_cases.comparison import same_bits
from torch_fp8.ops import rms_norm, swiglu, swiglu_backward

BF16, E4M3, E5M2, EPS = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, 1e-5
# torch's check of the schema multiplies the inputs, which FP8 on the CPU does not (torch 2.13).
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SHAPE = 20, 140


def check(name, arguments, compiles=True):
    operator = getattr(torch.ops.torch_fp8, name).default
    is_fp8 = any(isinstance(x, torch.Tensor) and x.dtype == E4M3 for x in arguments)
    checks = FP8_CHECKS if is_fp8 else ("test_schema", *FP8_CHECKS)
    checks = checks if compiles else checks[:-1]
    torch.library.opcheck(operator, arguments, test_utils=checks)


def backward_inputs(saved):
    """What backward takes; gate and up are halves of one tensor, or saved in FP8."""
    grad, both = torch.randn(SHAPE).to(BF16), torch.randn(SHAPE[0], 2 * SHAPE[1]).to(BF16)
    gate, up = swiglu_backward.halves(both, True)
    parts = swiglu.swiglu_save(gate, up, None)[:4] if saved else (gate, None, up, None)
    return BackwardInputs(grad, *parts, BF16)


@pytest.mark.parametrize("layouts", EACH, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_operators_that_cast(granularity, layouts):
    """What is compiled of an operator does not depend on layouts: those of one are not compiled."""
    check_it = functools.partial(check, compiles=all(layouts))
    x, weight, one = torch.randn(SHAPE).to(BF16), torch.rand(SHAPE[1]), torch.ones(())
    save, saved = layouts
    cast, norm = (E4M3, granularity, False, *layouts), (0.0, BF16)
    backward = backward_inputs(saved)
    by_tensor = granularity == "tensorwise"
    for scale, amax in ((one, None), (None, one)) if by_tensor else ((None, None),):
        known = *cast, scale, amax, None
        check_it("quantize_2d", (x, *known))
        if by_tensor and save:
            check_it("quantize_2d_beside", (x, *known, torch.randn(SHAPE[1], 9).to(E4M3)))
        check_it("rms_norm_quantize", (x, weight, torch.ones(SHAPE[0]), *norm, *known))
        check_it("swiglu_quantize", (x, x.clone(), weight, *known, save))
        check_it("gate_up_backward_quantize", (*backward, saved, *known))
        amaxes = None if amax is None else torch.ones(2)
        of_dup = None if scale is None else torch.ones(())
        check_it("swiglu_backward_quantize", (*backward, *cast, scale, amaxes, of_dup, None))
    given = one if by_tensor else None, None, None
    check_it("rms_norm_quantize_once", (x, weight, EPS, *norm, *cast, *given, save))
    summed = (x, weight, EPS, *norm, x.clone(), *cast, *given, save)
    check_it("sum_norm_quantize_once", summed)
    for c, scale in ((x.clone(), one.clone()), (None, None)):
        pair = x.clone(), x.clone(), c, one.clone(), one.clone(), scale
        check_it("cast_side_by_side", (*pair, cast[0], None))
        if by_tensor:
            check_it("quantize_joined", (*pair[:3], *cast, one, None, None))


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_other_operators(saved, smooth):
    x, weight, rstd = torch.randn(SHAPE).to(BF16), torch.rand(SHAPE[1]), torch.ones(SHAPE[0])
    backward, factor = backward_inputs(saved), weight.clone() if smooth else None
    cast = CastOptions(E4M3, "tensorwise", True, True, False, amax=torch.ones(()))
    for granularity in ("tensorwise", "rowwise", "block_1x128"):
        how = E4M3, granularity, True, True, True, None, None, x.float()
        check("quantize_2d_sum", (x, *how, torch.float32))
    *_, qdata, scale = rms_norm.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), True)
    parts = (qdata, scale) if saved else (x.clone(), None)
    check("rms_norm_statistics", (x, weight, EPS, 0.0, BF16, saved))
    check("rms_norm", (x, weight, rstd, 0.0, torch.float32))
    check("rms_norm_backward", (x, *parts, weight, rstd, 0.0, BF16, smooth))
    check("swiglu", (x, x.clone(), factor))
    check("swiglu_save", (x, x.clone(), factor, saved))
    check("swiglu_backward", backward)
    check("swiglu_backward_amax", backward)
    check("gate_up_backward", (*backward, saved))
    check("gate_up_backward_amax", backward)
    check("column_amax", (x,))
    check("swiglu_save_columns", (x, x.clone(), saved))
    check("smooth_factors", (weight,))
    check("quantize_columns", (x, weight, *cast))


def test_one_gradient_of_gate_and_up_has_the_dtype_asked_for():
    *arguments, _ = backward_inputs(saved=False)
    operator = torch.ops.torch_fp8.gate_up_backward.default
    assert operator(*arguments, torch.float32, True).dtype == torch.float32
    check("gate_up_backward", (*arguments, torch.float32, True))


def everything(x, both, weight):
    """Of a norm and of SwiGLU, forward and backward, with casts of what they make."""
    norm = NormInputs(x, weight, EPS, 0.0, x.dtype)
    rstd, amax, qdata, scale = rms_norm.rms_norm_statistics(norm, True)
    cast = CastOptions(E4M3, "tensorwise", False, True, True)
    blocks = CastOptions(E5M2, "block_1x128", True, True, True)
    y = rms_norm.rms_norm(norm.with_rstd(rstd))
    inputs = NormBackwardInputs(y, qdata, scale, weight, rstd, 0.0, BF16, True)
    made = [
        *rms_norm.rms_norm_quantize(norm.with_rstd(rstd), cast._replace(amax=amax)),
        *rms_norm.rms_norm_quantize_once(norm, blocks._replace(dtype=E4M3), True),
        *rms_norm.rms_norm_backward(inputs),
    ]
    gate, up = swiglu_backward.halves(both, True)
    *saved, amax = swiglu.swiglu_save(gate, up, weight)
    made += swiglu.swiglu_quantize(gate, up, weight, cast._replace(amax=amax), True)
    back = BackwardInputs(swiglu.swiglu(gate, up, weight), *saved, x.dtype)
    amax = swiglu_backward.gate_up_backward_amax(back)
    joined = cast._replace(dtype=E5M2, amax=amax)
    return (
        *made,
        *swiglu_backward.swiglu_backward_quantize(back, blocks),
        swiglu_backward.swiglu_backward_amax(back),
        *swiglu_backward.swiglu_backward(back),
        *swiglu_backward.gate_up_backward_quantize(back, True, joined),
        swiglu_backward.gate_up_backward(back, True),
    )


@pytest.mark.long
def test_compiles_with_shapes_that_change():
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, cols in ((20, 140), (33, 129)):
        arguments = torch.randn(rows, cols), torch.randn(rows, 2 * cols), torch.rand(cols)
        for a, b in zip(compiled(*arguments), everything(*arguments), strict=True):
            same_bits(a, b)

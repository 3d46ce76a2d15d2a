"""Cases of RMSNorm and SwiGLU that emit FP8, forward and backward.

Every cast equals, byte for byte, the cast of the plain result of the same device. Plain results
equal the CPU's but for what rstd, sums and exp differ by in float32: a BF16 result is the same or
its neighbour, and the same for all but one element in a hundred.

`ops` has the modules ``rms_norm``, ``swiglu``, ``swiglu_backward`` and ``smooth`` of
`torch_fp8`, or what stands for them; the reference is always theirs, on the CPU.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.internals import (
    BackwardInputs,
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
    format_of,
    scale_from_amax,
    tensor_amax,
)
from tests.kernel_cases.casts import BOTH, EACH, GRANULARITIES, Shape
from tests.kernel_cases.comparison import close, near, require, same_values
from torch_fp8.ops import rms_norm, swiglu, swiglu_backward
from torch_fp8.ops import smooth as smooth_ops
from torch_fp8.ops.quantize import quantize_2d, saved_values

BF16, EPS = torch.bfloat16, 1e-5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FEW_GRANULARITIES = ("tensorwise", "block_1x128")
SHAPES = (
    *((4096, 1024), (272, 4096), (144, 14336), (129, 20000)),
    *((37, 131), (17, 272), (1, 160), (0, 48)),
)
KINDS = ("gaussian", "inf", "nan", "zeros")
OPS = SimpleNamespace(
    rms_norm=rms_norm, swiglu=swiglu, swiglu_backward=swiglu_backward, smooth=smooth_ops
)


def matrix(shape: Shape, dtype: torch.dtype, kind: str = "gaussian", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)
    if x.numel() and kind == "zeros":
        x[: shape[0] // 2] = 0
    elif x.numel() and kind != "gaussian":
        x[-1, -1] = float(kind)
    return x.to(dtype)


def casts(amax: Tensor, few: bool) -> Iterator[CastOptions]:
    granularities: Sequence[str] = FEW_GRANULARITIES if few else GRANULARITIES
    layouts = BOTH if few else EACH
    for granularity, dtype, each in itertools.product(granularities, (E4M3, E5M2), layouts):
        options = CastOptions(dtype, granularity, granularity != "tensorwise", *each)
        if granularity == "tensorwise":
            scale = torch.full_like(amax.view(-1)[0], 0.02)
            yield options._replace(amax=amax)
            yield options._replace(scale=scale)
            yield options._replace(scale=scale, amax=torch.zeros_like(scale))
        else:
            yield options


def check_casts(
    results: Sequence[Tensor],
    amax: Tensor,
    quantize: Callable[..., Sequence[Tensor]],
    what: str,
    few: bool,
) -> None:
    """Check the amax of plain results, and their casts.

    Args:
        results: one result, or two that are cast in one launch.
        amax: () of one, or (2,).
        quantize: takes the options of the cast, and of two results the second's scale and slot
            where a scale is given; returns the layouts of each.
    """
    several = len(results) > 1
    want = torch.stack([tensor_amax(y) for y in results])
    same_values(amax, want if several else want[0], f"{what}: amax")
    for cast in casts(amax, few):
        second: tuple[Tensor | None, ...] = ()
        if several and cast.scale is not None:
            second = 2 * cast.scale, None if cast.amax is None else cast.amax.clone()
        made = quantize(cast, *second)
        each = cast.of_gradients(*second) if several else (cast,)
        for i, (y, one) in enumerate(zip(results, each, strict=True)):
            _same_cast(made[4 * i : 4 * i + 4], y, one, f"{what}: cast {cast[:5]}")


def _same_cast(made: Any, y: Tensor, cast: CastOptions, what: str) -> None:
    """Check layouts against the cast of a plain result, and a slot, which was zero."""
    slot = None
    if cast.raises_amax:
        slot, cast = cast.amax, cast._replace(amax=None)
        same_values(slot, tensor_amax(y), f"{what}: slot")
    _all_same(made, cast_of(y, cast), what)


def cast_of(y: Tensor, cast: CastOptions) -> tuple[Tensor | None, ...]:
    """Cast a plain result by itself: by a scale, by that of an amax, or by its own."""
    if cast.amax is None or cast.scale is not None:
        return quantize_2d(y, cast)
    scale = scale_from_amax(cast.amax, format_of(cast.dtype), cast.power_of_two)
    qdata, _, qdata_t, scale_t = quantize_2d(y, cast._replace(scale=scale, amax=None))
    return qdata, scale, qdata_t, scale_t


def check_norm(ops: Any, device: str, shape: Shape, kind: str, few: bool = False) -> None:
    norm = ops.rms_norm
    for dtype in (BF16,) if few else (BF16, torch.float32):
        what = f"RMSNorm of {shape} {dtype}, {kind}"
        x, weight = matrix(shape, dtype, kind), _weight(shape[1])
        want = rms_norm.rms_norm_statistics(NormInputs(x, weight, EPS, 1.0, dtype), True)
        x, weight = x.to(device), weight.to(device)
        rstd, amax, *saved = norm.rms_norm_statistics(NormInputs(x, weight, EPS, 1.0, dtype), True)
        close(rstd, want[0], 1e-6, f"{what}: rstd")
        _all_same(saved, want[2:], f"{what}: saved")
        norm_of = NormWithRstd(x, weight, rstd, 1.0, dtype)
        y = norm.rms_norm(norm_of)
        same_values(y, rms_norm.rms_norm(NormWithRstd(*_moved(norm_of, "cpu"))), what)

        def quantize(cast: CastOptions, of: NormWithRstd = norm_of) -> Any:
            return norm.rms_norm_quantize(of, cast)

        check_casts([y], amax, quantize, what, few)


def check_norm_once(
    ops: Any, device: str, shape: Shape, granularity: str, finds_amax: bool = False
) -> None:
    """Check that one launch equals two; a tensorwise scale is given, or of the amax it finds."""
    what = f"RMSNorm of {shape} in one launch, {granularity}"
    x, weight = matrix(shape, BF16).to(device), _weight(shape[1]).to(device)
    cast, inputs = CastOptions(E4M3, granularity, True, True, True), _norm_of(x, weight)
    every = [cast]
    if granularity == "tensorwise" and not finds_amax:
        scale, slot = (torch.full((), value, device=device) for value in (0.02, 0.0))
        every = [cast._replace(scale=scale), cast._replace(scale=scale, amax=slot)]
    want = rms_norm.rms_norm_statistics(inputs, True)
    for how in every:
        *made, rstd, saved, saved_scale = ops.rms_norm.rms_norm_quantize_once(inputs, how, True)
        close(rstd, want[0], 1e-6, f"{what}: rstd")
        _all_same((saved, saved_scale), want[2:], f"{what}: saved")
        _same_cast(made, rms_norm.rms_norm(inputs.with_rstd(rstd)), how, what)


def check_strides(ops: Any) -> None:
    """Check that inputs of any strides give what contiguous ones give, on the CPU."""
    cast = CastOptions(E4M3, "block_1x128", True, True, True)
    for x in (matrix((160, 48), BF16).t(), matrix((96, 480), BF16)[::2, 1::3]):
        results, what = [], f"of strides {x.stride()}"
        rstd = ops.rms_norm.rms_norm_statistics(_norm_of(x.contiguous(), _weight(160)), False)[0]
        for one in (x, x.contiguous()):
            other, _, *saved = ops.rms_norm.rms_norm_statistics(_norm_of(one, _weight(160)), True)
            close(other, rstd, 1e-6, f"{what}: rstd")
            inputs = NormWithRstd(one, _weight(160), rstd, 0.0, BF16)
            made = (*ops.rms_norm.rms_norm_quantize(inputs, cast), ops.rms_norm.rms_norm(inputs))
            results.append((*saved, *made, *ops.swiglu.swiglu_save(one, one, None)))
        _all_same(*results, what)


def _norm_of(x: Tensor, weight: Tensor) -> NormInputs:
    return NormInputs(x, weight, EPS, 0.0, BF16)


def check_norm_backward(ops: Any, device: str, shape: Shape, saved: bool) -> None:
    x, weight, grad = matrix(shape, BF16), _weight(shape[1]), matrix(shape, BF16, seed=1)
    rstd, _, qdata, scale = rms_norm.rms_norm_statistics(
        NormInputs(x, weight, EPS, 0.0, BF16), True
    )
    inputs = (qdata, scale) if saved else (x, None)
    arguments = NormBackwardInputs(grad, *inputs, weight, rstd, 0.0, BF16, True)
    moved = NormBackwardInputs(*_moved(arguments, device))
    want = rms_norm.rms_norm_backward(arguments)
    first, second = (ops.rms_norm.rms_norm_backward(moved) for _ in range(2))
    what = f"RMSNorm backward of {shape}{', saved in FP8' if saved else ''}"
    near(first[0], want[0], f"{what}: dx")
    terms = grad.double() * saved_values(*inputs).double() * rstd.double()[:, None]
    bound = 4 * shape[0] ** 0.5 * 2.0**-24 * terms.abs().sum(0)
    require(((first[1].cpu() - terms.sum(0)).abs() <= bound).all(), f"{what}: dw is too far off")
    _all_same(first, second, f"{what}: from run to run")


def check_swiglu(
    ops: Any, device: str, shape: Shape, kind: str, smooth: bool, few: bool = False
) -> None:
    what = f"SwiGLU of {shape}, {kind}{', smooth' if smooth else ''}"
    factor = _weight(shape[1]) - 0.25 if smooth else None
    arguments = (matrix(shape, BF16, kind), matrix(shape, BF16, seed=1), factor)
    on_device = _moved(arguments, device)
    h = ops.swiglu.swiglu(*on_device)
    near(h, swiglu.swiglu(*arguments), what)
    *made, amax = ops.swiglu.swiglu_save(*on_device)
    _all_same(made, swiglu.swiglu_save(*arguments)[:4], f"{what}: saved")

    def quantize(cast: CastOptions) -> Any:
        return ops.swiglu.swiglu_quantize(*on_device, cast, True)[:4]

    check_casts([h], amax, quantize, what, few)
    for each in BOTH if few else EACH:
        cast = CastOptions(E4M3, "tensorwise", False, *each)
        _same_cast(quantize(cast), h, cast, f"{what}: amax found, {each}")


def check_smoothing(ops: Any, device: str, shape: Shape, kind: str) -> None:
    """Check the amaxes of channels, their factors, and a cast of channels times factors."""
    what = f"smoothing of {shape}, {kind}"
    arguments = matrix(shape, BF16, kind), matrix(shape, BF16, seed=1)
    gate, up = _moved(arguments, device)
    *saved, amax = ops.smooth.swiglu_save_columns(gate, up, True)
    _all_same(saved, swiglu.swiglu_save(*arguments, None)[:4], f"{what}: saved")
    h = swiglu.swiglu(gate, up, None)
    _all_same([amax], [smooth_ops.column_amax.reference(h.cpu())], f"{what}: amax")
    _all_same([ops.smooth.column_amax(h)], [amax], f"{what}: amax of a tensor")
    factors = ops.smooth.smooth_factors(amax)
    _all_same(factors, smooth_ops.smooth_factors.reference(amax.cpu()), f"{what}: factors")
    times = (gate.float() * factors[0]).cpu()
    for granularity in FEW_GRANULARITIES:
        known = tensor_amax(times) if granularity == "tensorwise" else None
        cast = CastOptions(E4M3, granularity, True, True, True, amax=known)
        want = cast_of(times, cast)
        on_device = cast._replace(amax=None if known is None else known.to(device))
        made = ops.smooth.quantize_columns(gate, factors[0], on_device)
        _all_same(made, want, f"{what}: {granularity}")
    scale, slot = (torch.full((), value, device=device) for value in (0.02, 0.0))
    cast = CastOptions(E4M3, "tensorwise", False, True, True, scale, slot)
    made = ops.smooth.quantize_columns(gate, factors[0], cast)
    _same_cast(made, times.to(device), cast, f"{what}: with a slot")


def check_swiglu_backward(
    ops: Any, device: str, shape: Shape, saved: bool, few: bool = False
) -> None:
    what = f"SwiGLU backward of {shape}{', saved in FP8' * saved}"
    gate, up, grad = (matrix(shape, BF16, seed=i) for i in range(3))
    arguments = BackwardInputs(grad, gate, None, up, None, BF16)
    if saved:
        arguments = _saved(arguments)
    on_device = BackwardInputs(*_moved(arguments, device))
    backward = ops.swiglu_backward
    gradients = backward.swiglu_backward(on_device)
    for got, want in zip(gradients, swiglu_backward.swiglu_backward(arguments), strict=True):
        near(got, want, what)
    amax = backward.swiglu_backward_amax(on_device)

    def quantize(cast: CastOptions, *second: Tensor | None) -> Any:
        return backward.swiglu_backward_quantize(on_device, cast, *second)

    check_casts(gradients, amax, quantize, what, few)


def check_gate_up(ops: Any, device: str, shape: Shape, gate_first: bool, few: bool = False) -> None:
    """Check the one gradient of gate and up, where they are one layer's output, and its casts."""
    what = f"gate_up backward of {shape}, {'gate' if gate_first else 'up'} first"
    both = matrix((shape[0], 2 * shape[1]), BF16)
    gate, up = swiglu_backward.halves(both, gate_first)
    grad = matrix(shape, BF16, seed=2)
    arguments = _saved(BackwardInputs(grad, gate, None, up, None, BF16))
    on_device = BackwardInputs(*_moved(arguments, device))
    by_kernel = ops.swiglu_backward.gate_up_backward(on_device, gate_first)
    dgate, dup = ops.swiglu_backward.swiglu_backward(on_device)
    same_values(by_kernel, torch.cat([dgate, dup] if gate_first else [dup, dgate], 1), what)
    amax = ops.swiglu_backward.gate_up_backward_amax(on_device)

    def quantize(cast: CastOptions) -> Any:
        return ops.swiglu_backward.gate_up_backward_quantize(on_device, gate_first, cast)

    check_casts([by_kernel], amax, quantize, what, few)


def _all_same(made: Iterable[Any], want: Iterable[Any], what: str) -> None:
    for got, expected in zip(made, want, strict=True):
        same_values(got, expected, what)


def _saved(inputs: BackwardInputs) -> BackwardInputs:
    gate, gate_scale, up, up_scale = swiglu.swiglu_save(inputs.gate, inputs.up, None)[:4]
    return inputs._replace(gate=gate, gate_scale=gate_scale, up=up, up_scale=up_scale)


def _weight(features: int) -> Tensor:
    return torch.rand(features, generator=torch.Generator().manual_seed(7)) + 0.5


def _moved(arguments: Iterable[Any], device: str) -> list[Any]:
    return [t.to(device) if isinstance(t, Tensor) else t for t in arguments]

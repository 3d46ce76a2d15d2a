"""Cases of RMSNorm and SwiGLU that emit FP8, forward and backward.

Every cast equals, byte for byte, the cast of the plain result of the same device. Plain results
equal the CPU's but for what rstd, sums and exp differ by in float32: a BF16 result is the same or
its neighbour, and the same for all but one element in a hundred.

`ops` has the modules ``rms_norm``, ``swiglu``, ``swiglu_backward``, ``gate_up`` and ``smooth`` of
`torch_fp8`, or what stands for them; the reference is always theirs, on the CPU.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernel_cases.casts import BOTH, EACH, GRANULARITIES, Shape
from tests.kernel_cases.comparison import close, near, require, same_values
from torch_fp8.kernels.arguments import (
    BackwardInputs,
    CastOptions,
    DelayedCastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
)
from torch_fp8.ops import gate_up, rms_norm, swiglu, swiglu_backward
from torch_fp8.ops import smooth as smooth_ops
from torch_fp8.ops.fused_quantize import cast_result
from torch_fp8.quantization.scaling import tensor_amax

BF16, EPS = torch.bfloat16, 1e-5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FEW_GRANULARITIES = ("tensorwise", "block_1x128")
SHAPES = (
    *((4096, 1024), (272, 4096), (144, 14336), (129, 20000)),
    *((37, 131), (17, 272), (1, 160), (0, 48)),
)
KINDS = ("gaussian", "inf", "nan", "zeros")
OPS = SimpleNamespace(
    rms_norm=rms_norm,
    swiglu=swiglu,
    swiglu_backward=swiglu_backward,
    gate_up=gate_up,
    smooth=smooth_ops,
)


def matrix(shape: Shape, dtype: torch.dtype, kind: str = "gaussian", seed: int = 0) -> Tensor:
    """Return rows of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)
    if x.numel() and kind == "zeros":
        x[: shape[0] // 2] = 0
    elif x.numel() and kind != "gaussian":
        x[-1, -1] = float(kind)
    return x.to(dtype)


def casts(amax: Tensor, few: bool) -> Iterator[CastOptions]:
    """Yield the options of every cast, or of a few."""
    granularities: Sequence[str] = FEW_GRANULARITIES if few else GRANULARITIES
    layouts = BOTH if few else EACH
    for granularity, dtype, each in itertools.product(granularities, (E4M3, E5M2), layouts):
        options = CastOptions(dtype, granularity, granularity != "tensorwise", *each)
        if granularity == "tensorwise":
            yield options._replace(amax=amax)
            yield options._replace(scale=torch.full_like(amax, 0.02))
        else:
            yield options


def check_casts(
    results: Sequence[Tensor],
    amax: Tensor,
    quantize: Callable[[CastOptions], Sequence[Tensor]],
    what: str,
    few: bool,
) -> None:
    """Check the amax of plain results, and their casts.

    Args:
        results: one result, or two that are cast in one launch.
        amax: () of one, or (2,).
        quantize: returns the layouts of each, and behind them the amax where a scale was given.
    """
    several = len(results) > 1
    want = torch.stack([tensor_amax(y) for y in results])
    same_values(amax, want if several else want[0], f"{what}: amax")
    for cast in casts(amax, few):
        *made, taken = quantize(cast)
        for i, y in enumerate(results):
            expected = cast_result(y, cast.part(i) if several else cast)[:4]
            _all_same(made[4 * i : 4 * i + 4], expected, f"{what}: cast {cast[:5]}")
        same_values(taken, None if cast.scale is None else amax, f"{what}: amax")


def check_norm(ops: Any, device: str, shape: Shape, kind: str, few: bool = False) -> None:
    """Check the norm, what it saves, its amax and its casts."""
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

        def quantize(cast: CastOptions, of: NormWithRstd = norm_of, y: Tensor = y) -> Any:
            taken = None if cast.scale is None else tensor_amax(y)
            return (*norm.rms_norm_quantize(of, cast), taken)

        check_casts([y], amax, quantize, what, few)


def check_norm_once(
    ops: Any, device: str, shape: Shape, granularity: str, finds_amax: bool = False
) -> None:
    """Check that one launch equals two; a tensorwise scale is given, or of the amax it finds."""
    what = f"RMSNorm of {shape} in one launch, {granularity}"
    x, weight = matrix(shape, BF16).to(device), _weight(shape[1]).to(device)
    given = granularity == "tensorwise" and not finds_amax
    scale = torch.tensor(0.02, device=device) if given else None
    cast = CastOptions(E4M3, granularity, True, True, True, scale)
    *made, rstd, saved, saved_scale, amax = ops.rms_norm.rms_norm_quantize_once(
        NormInputs(x, weight, EPS, 0.0, BF16), cast, True
    )
    want = rms_norm.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), True)
    close(rstd, want[0], 1e-6, f"{what}: rstd")
    _all_same((saved, saved_scale), want[2:], f"{what}: saved")
    y = rms_norm.rms_norm(NormWithRstd(x, weight, rstd, 0.0, BF16))
    _all_same((*made, amax), cast_result(y, cast, finds_amax), what)


def check_norm_backward(ops: Any, device: str, shape: Shape, saved: bool) -> None:
    """Check the gradients: near the CPU's, and the same each time."""
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
    near(first[1], want[1], f"{what}: dw")
    _all_same(first, second, f"{what}: from run to run")


def check_swiglu(
    ops: Any, device: str, shape: Shape, kind: str, smooth: bool, few: bool = False
) -> None:
    """Check SwiGLU, what it saves, its amax and its casts."""
    what = f"SwiGLU of {shape}, {kind}{', smooth' if smooth else ''}"
    factor = _weight(shape[1]) - 0.25 if smooth else None
    arguments = (matrix(shape, BF16, kind), matrix(shape, BF16, seed=1), factor)
    on_device = _moved(arguments, device)
    h = ops.swiglu.swiglu(*on_device)
    near(h, swiglu.swiglu(*arguments), what)
    *made, amax = ops.swiglu.swiglu_save(*on_device)
    _all_same(made, swiglu.swiglu_save(*arguments)[:4], f"{what}: saved")

    def quantize(cast: CastOptions) -> Any:
        made = ops.swiglu.swiglu_quantize(*on_device, cast, True)
        return (*made[:4], made[8])

    check_casts([h], amax, quantize, what, few)
    for each in BOTH if few else EACH:
        cast = CastOptions(E4M3, "tensorwise", False, *each)
        made = quantize(cast)
        _all_same(made, cast_result(h, cast, finds_amax=True), f"{what}: amax found, {each}")


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
        want = cast_result(times, cast)[:4]
        on_device = cast._replace(amax=None if known is None else known.to(device))
        made = ops.smooth.quantize_columns(gate, factors[0], on_device)
        _all_same(made, want, f"{what}: {granularity}")


def check_swiglu_backward(
    ops: Any, device: str, shape: Shape, smooth: bool, saved: bool, few: bool = False
) -> None:
    """Check the gradients of gate and up, and their casts."""
    what = f"SwiGLU backward of {shape}{', smooth' * smooth}{', saved in FP8' * saved}"
    gate, up, grad = (matrix(shape, BF16, seed=i) for i in range(3))
    factor = _weight(shape[1]) - 0.25 if smooth else None
    arguments = BackwardInputs(grad, gate, None, up, None, factor, BF16)
    if saved:
        arguments = _saved(arguments)
    on_device = BackwardInputs(*_moved(arguments, device))
    backward = ops.swiglu_backward
    gradients = backward.swiglu_backward(on_device)
    for got, want in zip(gradients, swiglu_backward.swiglu_backward(arguments), strict=True):
        near(got, want, what)
    amax = backward.swiglu_backward_amax(on_device)

    def quantize(cast: CastOptions) -> Any:
        return backward.swiglu_backward_quantize(on_device, cast)

    check_casts(gradients, amax, quantize, what, few)


def check_gate_up(ops: Any, device: str, shape: Shape, gate_first: bool, few: bool = False) -> None:
    """Check the one gradient of gate and up, where they are one layer's output, and its casts."""
    what = f"gate_up backward of {shape}, {'gate' if gate_first else 'up'} first"
    both = matrix((shape[0], 2 * shape[1]), BF16)
    gate, up = gate_up.halves(both, gate_first)
    factor, grad = _weight(shape[1]) - 0.25, matrix(shape, BF16, seed=2)
    arguments = _saved(BackwardInputs(grad, gate, None, up, None, factor, BF16))
    on_device = BackwardInputs(*_moved(arguments, device))
    made = ops.gate_up.gate_up_backward(on_device, gate_first)
    dgate, dup = swiglu_backward.swiglu_backward(on_device)
    same_values(made, torch.cat([dgate, dup] if gate_first else [dup, dgate], 1), what)
    amax = ops.gate_up.gate_up_backward_amax(on_device)

    def quantize(cast: CastOptions) -> Any:
        return ops.gate_up.gate_up_backward_quantize(on_device, gate_first, cast)

    check_casts([made], amax, quantize, what, few)


def check_delayed(
    ops: Any, device: str, shape: Shape, kind: str, filled: bool, few: bool = False
) -> None:
    """Check the delayed casts of all producers.

    Without a history the last program casts everything: what it does is the same each time.
    """
    what = f"of {shape}, {kind}, {'with' if filled else 'without'} a history"
    x, up, grad = (matrix(shape, BF16, kind, seed=i).to(device) for i in range(3))
    weight = _weight(shape[1]).to(device)
    rstd, *_ = ops.rms_norm.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), False)
    y = ops.rms_norm.rms_norm(NormWithRstd(x, weight, rstd, 0.0, BF16))
    for how in _delayed(y, filled, few):
        made = ops.rms_norm.rms_norm_quantize_once(NormInputs(x, weight, EPS, 0.0, BF16), how, True)
        # The sums of this launch have an order of their own.
        y = ops.rms_norm.rms_norm(NormWithRstd(x, weight, made[4], 0.0, BF16))
        _same_delayed((*made[:4], made[7]), y, how, f"RMSNorm {what}")
    h, inputs = ops.swiglu.swiglu(x, up, None), BackwardInputs(grad, x, None, up, None, None, BF16)
    for how in _delayed(h, filled, few):
        made = ops.swiglu.swiglu_quantize(x, up, None, how, True)
        _same_delayed((*made[:4], made[8]), h, how, f"SwiGLU {what}")
    backward = ops.swiglu_backward
    dgate, dup = backward.swiglu_backward(inputs)
    for of_gate, of_up in zip(_delayed(dgate, filled, few), _delayed(dup, True, few), strict=True):
        made = backward.swiglu_backward_quantize(inputs, of_gate, *of_up[:2])
        for i, (d, how) in enumerate(((dgate, of_gate), (dup, of_up))):
            outputs = (*made[4 * i : 4 * i + 4], made[8][i])
            _same_delayed(outputs, d, how, f"SwiGLU backward {what}")
    both = ops.gate_up.gate_up_backward(inputs, True)
    for how in _delayed(both, filled, few):
        made = ops.gate_up.gate_up_backward_quantize(inputs, True, how)
        _same_delayed(made, both, how, f"gate_up backward {what}")


def _delayed(y: Tensor, filled: bool, few: bool) -> Iterator[DelayedCastOptions]:
    """Yield every delayed cast of a result y, with a history that is empty or of about its size."""
    amaxes = torch.zeros(1024, device=y.device)
    if filled:
        amaxes[3] = tensor_amax(y).nan_to_num(1.0, 1.0) / 2
    algorithms, layouts = (("max",), BOTH) if few else (("max", "most_recent"), EACH)
    for dtype, algorithm, each in itertools.product((E4M3, E5M2), algorithms, layouts):
        progress = torch.zeros(2, device=y.device)
        yield DelayedCastOptions(amaxes, progress, dtype, algorithm, 0, *each)


def _same_delayed(made: Any, y: Tensor, how: DelayedCastOptions, what: str) -> None:
    _all_same(made, cast_result(y, how), what)
    require(not how.progress.any(), f"{what}: progress is left over")


def _all_same(made: Iterable[Any], want: Iterable[Any], what: str) -> None:
    for got, expected in zip(made, want, strict=True):
        same_values(got, expected, what)


def _saved(inputs: BackwardInputs) -> BackwardInputs:
    """Replace gate and up by what is saved of them for backward."""
    gate, gate_scale, up, up_scale = swiglu.swiglu_save(inputs.gate, inputs.up, None)[:4]
    return inputs._replace(gate=gate, gate_scale=gate_scale, up=up, up_scale=up_scale)


def _weight(features: int) -> Tensor:
    return torch.rand(features, generator=torch.Generator().manual_seed(7)) + 0.5


def _moved(arguments: Iterable[Any], device: str) -> list[Any]:
    return [t.to(device) if isinstance(t, Tensor) else t for t in arguments]

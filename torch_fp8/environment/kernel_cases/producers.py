"""Cases of RMSNorm and SwiGLU that emit FP8, forward and backward.

Every cast equals, byte for byte, the cast of the plain result of the same device. Plain results
equal the CPU's but for what rstd, sums and exp differ by in float32: a BF16 result is the same or
its neighbour, and the same for all but one element in a hundred.

`ops` has the modules ``rms_norm``, ``swiglu``, ``swiglu_backward`` and ``gate_up`` of `torch_fp8`,
or what stands for them; the reference is always theirs, on the CPU.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_fp8.environment.kernel_cases.casts import EACH, GRANULARITIES, Shape
from torch_fp8.environment.kernel_cases.comparison import close, near, require, same_values
from torch_fp8.kernels.arguments import BackwardInputs, CastOptions, DelayedCastOptions
from torch_fp8.ops import gate_up, rms_norm, swiglu, swiglu_backward
from torch_fp8.ops.fused_quantize import cast_delayed, cast_result, taken_amax
from torch_fp8.quantization.scaling import tensor_amax

BF16, EPS = torch.bfloat16, 1e-5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((4096, 1024), (272, 4096), (144, 14336), (37, 131), (1, 160), (129, 20000), (0, 48))
KINDS = ("gaussian", "inf", "nan", "zeros")
ONCE = (
    ((8192, 4096), "tensorwise"),
    ((33792, 512), "block_1x128"),
    ((33792, 512), "block_128x128"),
    ((8192, 512), "block_1x32"),
    ((64, 512), "block_1x128"),
)
OPS = SimpleNamespace(
    rms_norm=rms_norm, swiglu=swiglu, swiglu_backward=swiglu_backward, gate_up=gate_up
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


def casts(
    amax: Tensor, granularities: Iterable[str], layouts: Iterable[Any]
) -> Iterator[CastOptions]:
    """Yield the options of every cast."""
    for granularity, dtype, each in itertools.product(granularities, (E4M3, E5M2), layouts):
        options = CastOptions(dtype, granularity, granularity != "tensorwise", *each)
        if granularity == "tensorwise":
            yield options._replace(amax=amax)
            yield options._replace(scale=torch.full_like(amax, 0.02))
        else:
            yield options


def same_casts(made: Sequence[Tensor], y: Tensor, options: CastOptions, what: str) -> None:
    """Require the layouts of y, and behind them its amax where a scale was given."""
    want = (*cast_result(y, options), taken_amax(y, options))
    for got, expected in zip(made, want[: len(made)], strict=True):
        same_values(got, expected, f"{what}: cast {options[:5]}")


def check_norm(
    ops: Any,
    device: str,
    shape: Shape,
    kind: str,
    dtypes: Iterable[torch.dtype] = (BF16, torch.float32),
    granularities: Sequence[str] = GRANULARITIES,
    layouts: Sequence[Any] = EACH,
) -> None:
    """Check the norm, what it saves, its amax and its casts."""
    norm = ops.rms_norm
    for dtype in dtypes:
        what = f"RMSNorm of {shape} {dtype}, {kind}"
        x, weight = matrix(shape, dtype, kind), _weight(shape[1])
        want = rms_norm.rms_norm_statistics(x, weight, EPS, 1.0, dtype, True)
        x, weight = x.to(device), weight.to(device)
        rstd, amax, *saved = norm.rms_norm_statistics(x, weight, EPS, 1.0, dtype, True)
        close(rstd, want[0], 1e-6, f"{what}: rstd")
        for got, expected in zip(saved, want[2:], strict=True):
            same_values(got, expected, f"{what}: saved")
        y = norm.rms_norm(x, weight, rstd, 1.0, dtype)
        same_rstd = rms_norm.rms_norm(x.cpu(), weight.cpu(), rstd.cpu(), 1.0, dtype)
        same_values(y, same_rstd, what)
        same_values(amax, tensor_amax(y), f"{what}: amax")
        for cast in casts(amax, granularities, layouts):
            same_casts(norm.rms_norm_quantize(x, weight, rstd, 1.0, dtype, cast), y, cast, what)


def check_norm_once(ops: Any, device: str, shape: Shape, granularity: str) -> None:
    """Check that one launch equals two."""
    norm, what = ops.rms_norm, f"RMSNorm of {shape} in one launch, {granularity}"
    x, weight = matrix(shape, BF16).to(device), _weight(shape[1]).to(device)
    scale = torch.tensor(0.02, device=device) if granularity == "tensorwise" else None
    cast = CastOptions(E4M3, granularity, True, True, True, scale)
    *made, rstd, saved, saved_scale, amax = norm.rms_norm_quantize_once(
        x, weight, EPS, 0.0, BF16, cast, True
    )
    want = rms_norm.rms_norm_statistics(x, weight, EPS, 0.0, BF16, True)
    close(rstd, want[0], 1e-6, f"{what}: rstd")
    same_values(saved, want[2], f"{what}: saved")
    same_values(saved_scale, want[3], f"{what}: saved scale")
    y = rms_norm.rms_norm(x, weight, rstd, 0.0, BF16)
    same_casts([*made, amax], y, cast, what)


def check_norm_backward(ops: Any, device: str, shape: Shape, saved: bool) -> None:
    """Check the gradients: near the CPU's, and the same each time."""
    x, weight, grad = matrix(shape, BF16), _weight(shape[1]), matrix(shape, BF16, seed=1)
    rstd, _, qdata, scale = rms_norm.rms_norm_statistics(x, weight, EPS, 0.0, BF16, True)
    inputs = (qdata, scale) if saved else (x, None)
    arguments = (grad, *inputs, weight, rstd, 0.0, BF16, True)
    moved = _moved(arguments, device)
    want = rms_norm.rms_norm_backward(*arguments)
    first, second = (ops.rms_norm.rms_norm_backward(*moved) for _ in range(2))
    what = f"RMSNorm backward of {shape}{', saved in FP8' if saved else ''}"
    near(first[0], want[0], f"{what}: dx")
    near(first[1], want[1], f"{what}: dw")
    for a, b in zip(first, second, strict=True):
        same_values(a, b, f"{what}: from run to run")


def check_swiglu(
    ops: Any,
    device: str,
    shape: Shape,
    kind: str,
    smooth: bool,
    granularities: Sequence[str] = GRANULARITIES,
    layouts: Sequence[Any] = EACH,
) -> None:
    """Check SwiGLU, what it saves, its amax and its casts."""
    what = f"SwiGLU of {shape}, {kind}{', smooth' if smooth else ''}"
    gate, up, factor = matrix(shape, BF16, kind), matrix(shape, BF16, seed=1), None
    if smooth:
        factor = _weight(shape[1]) - 0.25
    want = swiglu.swiglu(gate, up, factor)
    saved = swiglu.swiglu_save(gate, up, factor)[:4]
    on_device = _moved((gate, up, factor), device)
    h = ops.swiglu.swiglu(*on_device)
    near(h, want, what)
    *made, amax = ops.swiglu.swiglu_save(*on_device)
    for got, expected in zip(made, saved, strict=True):
        same_values(got, expected, f"{what}: saved")
    same_values(amax, tensor_amax(h), f"{what}: amax")
    for cast in casts(amax, granularities, layouts):
        *made, _, _, _, _, taken = ops.swiglu.swiglu_quantize(*on_device, cast, True)
        same_casts([*made, taken], h, cast, what)


def check_swiglu_backward(
    ops: Any,
    device: str,
    shape: Shape,
    smooth: bool,
    saved: bool,
    granularities: Sequence[str] = GRANULARITIES,
    layouts: Sequence[Any] = EACH,
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
    same_values(amax, torch.stack([tensor_amax(d) for d in gradients]), f"{what}: amax")
    for cast in casts(amax, granularities, layouts):
        *made, taken = backward.swiglu_backward_quantize(on_device, cast)
        for i, d in enumerate(gradients):
            same_casts(made[4 * i : 4 * i + 4], d, cast.part(i), what)
        same_values(taken, amax if cast.scale is not None else amax.new_empty(0), f"{what}: amax")


def check_gate_up(
    ops: Any,
    device: str,
    shape: Shape,
    gate_first: bool,
    granularities: Sequence[str] = GRANULARITIES,
    layouts: Sequence[Any] = EACH,
) -> None:
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
    same_values(amax, tensor_amax(made), f"{what}: amax")
    for cast in casts(amax, granularities, layouts):
        outputs = ops.gate_up.gate_up_backward_quantize(on_device, gate_first, cast)
        same_casts(outputs, made, cast, what)


def check_delayed(
    ops: Any,
    device: str,
    shape: Shape,
    kind: str,
    filled: bool,
    layouts: Sequence[Any] = EACH,
    algorithms: Sequence[str] = ("max", "most_recent"),
) -> None:
    """Check the delayed casts of all producers.

    Without a history the last program casts everything: what it does is the same each time.
    """
    what = f"of {shape}, {kind}, {'with' if filled else 'without'} a history"

    def ways(y: Tensor, filled: bool) -> Iterator[DelayedCastOptions]:
        return _delayed(y, filled, layouts, algorithms)

    x, up, grad = (matrix(shape, BF16, kind, seed=i).to(device) for i in range(3))
    weight = _weight(shape[1]).to(device)
    rstd, *_ = ops.rms_norm.rms_norm_statistics(x, weight, EPS, 0.0, BF16, False)
    y = ops.rms_norm.rms_norm(x, weight, rstd, 0.0, BF16)
    for how in ways(y, filled):
        made = ops.rms_norm.rms_norm_quantize_delayed(x, weight, EPS, 0.0, BF16, how, True)
        # The sums of this launch have an order of their own.
        y = ops.rms_norm.rms_norm(x, weight, made[3], 0.0, BF16)
        _same_delayed((*made[:3], made[6]), y, how, f"RMSNorm {what}")
    h, inputs = ops.swiglu.swiglu(x, up, None), BackwardInputs(grad, x, None, up, None, None, BF16)
    for how in ways(h, filled):
        made = ops.swiglu.swiglu_quantize_delayed(x, up, None, how, True)
        _same_delayed((*made[:3], made[7]), h, how, f"SwiGLU {what}")
    gradients = ops.swiglu_backward.swiglu_backward(inputs)
    casts_of_both = zip(ways(gradients[0], filled), ways(gradients[1], True), strict=True)
    for pair in casts_of_both:
        of_gate, of_up = pair
        delayed = ops.swiglu_backward.swiglu_backward_quantize_delayed
        made = delayed(inputs, of_up.amaxes, of_up.progress, of_gate)
        for i, (d, how) in enumerate(zip(gradients, pair, strict=True)):
            outputs = (*made[3 * i : 3 * i + 3], made[6][i])
            _same_delayed(outputs, d, how, f"SwiGLU backward {what}")
    both = ops.gate_up.gate_up_backward(inputs, True)
    for how in ways(both, filled):
        made = ops.gate_up.gate_up_backward_quantize_delayed(inputs, True, how)
        _same_delayed(made, both, how, f"gate_up backward {what}")


def _delayed(
    y: Tensor, filled: bool, layouts: Sequence[Any], algorithms: Sequence[str]
) -> Iterator[DelayedCastOptions]:
    """Yield every delayed cast of a result y, with a history that is empty or of about its size."""
    amaxes = torch.zeros(1024, device=y.device)
    if filled:
        amaxes[3] = tensor_amax(y).nan_to_num(1.0, 1.0) / 2
    for dtype, algorithm, (row, col) in itertools.product((E4M3, E5M2), algorithms, layouts):
        progress = torch.zeros(2, dtype=torch.int32, device=y.device)
        yield DelayedCastOptions(amaxes, progress, dtype, algorithm, 0, row, col)


def _same_delayed(made: Any, y: Tensor, how: DelayedCastOptions, what: str) -> None:
    for got, expected in zip(made, cast_delayed(y, how), strict=True):
        same_values(got, expected, what)
    require(not how.progress.any(), f"{what}: progress is left over")


def _saved(inputs: BackwardInputs) -> BackwardInputs:
    """Replace gate and up by what is saved of them for backward."""
    gate, gate_scale, up, up_scale = swiglu.swiglu_save(inputs.gate, inputs.up, None)[:4]
    return inputs._replace(gate=gate, gate_scale=gate_scale, up=up, up_scale=up_scale)


def _weight(features: int) -> Tensor:
    return torch.rand(features, generator=torch.Generator().manual_seed(7)) + 0.5


def _moved(arguments: Iterable[Any], device: str) -> list[Any]:
    return [t.to(device) if isinstance(t, Tensor) else t for t in arguments]

"""SwiGLU's backward on CUDA: `torch_fp8.ops.swiglu_backward`, up to the last bits of exp.

Memory traffic in bytes per BF16 element: `swiglu_backward_quantize` reads 2 of the gradient and 2
of saved gate and up, and writes 2 per layout; `swiglu_backward_amax` reads the same 4. The
launchers ``gate_up_*`` write both gradients into the halves of one matrix (R, 2C).

Legend: R rows, C columns of gate and of up. Launch configurations are fixed, not tuned at run time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TYPES,
    amax_bits,
    amax_slot,
    cdiv,
    fused_flags,
    pointers,
    scale_source,
)
from torch_fp8.kernels.quantize import quantize_2d
from torch_fp8.kernels.swiglu import ROWS, WARPS, is_fused, tile
from torch_fp8.kernels.swiglu_backward_kernels import (
    swiglu_backward_cast_kernel,
    swiglu_backward_kernel,
)
from torch_fp8.quantization.payload_shape import Layouts


def swiglu_backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward`."""
    grad, dtype = inputs.grad, inputs.out_dtype
    dgate, dup = grad.new_empty(grad.shape, dtype=dtype), grad.new_empty(grad.shape, dtype=dtype)
    _store_gradients(inputs, dgate, dup, None)
    return dgate, dup


def swiglu_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_amax`."""
    largest = amax_bits(inputs.grad, 2)
    _store_gradients(inputs, None, None, largest)
    return largest.view(torch.float32)


def swiglu_backward_quantize(
    inputs: BackwardInputs,
    options: CastOptions,
    dup_scale: Tensor | None = None,
    dup_amax: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_quantize`."""
    grad, casts = inputs.grad, options.of_gradients(dup_scale, dup_amax)
    if _casts_at_once(inputs, options):
        layouts = tuple(t for cast in casts for t in cast.new_layouts(grad))
        _cast_gradients(inputs, casts, layouts)
        return layouts
    gradients = swiglu_backward(inputs)
    return tuple(t for d, cast in zip(gradients, casts, strict=True) for t in quantize_2d(d, cast))


def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.gate_up_backward`."""
    rows, cols = inputs.grad.shape
    both = inputs.grad.new_empty((rows, 2 * cols), dtype=inputs.out_dtype)
    _store_gradients(inputs, *_halves(both, 1, gate_first), None, joined=True)
    return both


def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.gate_up_backward_amax`."""
    largest = amax_bits(inputs.grad)
    _store_gradients(inputs, None, None, largest, joined=True)
    return largest.view(torch.float32)


def gate_up_backward_quantize(
    inputs: BackwardInputs, gate_first: bool, options: CastOptions
) -> Layouts:
    """See `torch_fp8.ops.swiglu_backward.gate_up_backward_quantize`."""
    grad = inputs.grad
    # A block with columns of both gradients would span two tiles.
    whole = options.granularity == "tensorwise" or grad.shape[1] % BLOCK == 0
    if not (whole and _casts_at_once(inputs, options)):
        return quantize_2d(gate_up_backward(inputs, gate_first), options)
    layouts = options.new_layouts(grad, 2 * grad.shape[1])
    halves = [_halves(t, dim, gate_first) for t, dim in zip(layouts, (1, 1, 0, 0), strict=True)]
    dgate, dup = zip(*halves, strict=True)
    _cast_gradients(inputs, (options, options), (*dgate, *dup), joined=True)
    return layouts


def _halves(x: Any, dim: int, gate_first: bool) -> tuple[Any, Any]:
    """Return views of gate's and up's halves of a matrix; both share a scalar scale or None."""
    if x is None or x.ndim < 2:
        return x, x
    size = x.shape[dim] // 2
    first, second = x.narrow(dim, 0, size), x.narrow(dim, size, size)
    return (first, second) if gate_first else (second, first)


def _casts_at_once(inputs: BackwardInputs, options: CastOptions) -> bool:
    """Return whether one launch can compute and cast both gradients.

    Registers cannot hold both for a tile of 128 rows.
    """
    fits = is_fused(options, inputs.grad, inputs.gate, inputs.up)
    return fits and tile(options)[0] < BLOCK


def _store_gradients(
    inputs: BackwardInputs,
    dgate: Tensor | None,
    dup: Tensor | None,
    largest: Tensor | None,
    joined: bool = False,
) -> None:
    """Compute both gradients; store them, raise their amaxes, or do both.

    Args:
        dgate, dup: (R, C) outputs, contiguous, or if `joined` the halves of a matrix (R, 2C); or
            None.
        largest: int32 bits of the amaxes, (2,), or if `joined` of one for both, (); or None.
        joined: whether both gradients are parts of one matrix.
    """
    grad = inputs.grad
    rows, cols = grad.shape
    if not grad.numel():
        return
    unused = grad if dgate is None else dgate
    operands, strides, flags = _operands(inputs, joined)
    swiglu_backward_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
        *pointers(operands, unused),
        *pointers((dgate, dup, largest), unused),
        *strides,
        rows,
        cols,
        STORE=dgate is not None,
        AMAX=largest is not None,
        **flags,
    )


def _cast_gradients(
    inputs: BackwardInputs,
    casts: Sequence[CastOptions],
    layouts: Sequence[Tensor | None],
    joined: bool = False,
) -> None:
    """Fill the layouts of both gradients, and raise their amaxes if the options have slots.

    Args:
        casts: cast options of dgate and dup, which differ only in scale and amax.
        layouts: ``(q, s, qt, st)`` of dgate, then of dup; if `joined`, views of those of one
            matrix.
        joined: whether both gradients are parts of one matrix.
    """
    grad = inputs.grad
    rows, cols = grad.shape
    operands, strides, flags = _operands(inputs, joined)
    swiglu_backward_cast_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
        *pointers(operands, grad),
        *(scale_source(cast, grad) for cast in casts),
        *pointers((*(amax_slot(cast) for cast in casts), *layouts), grad),
        *strides,
        rows,
        cols,
        AMAX=casts[0].raises_amax,
        **fused_flags(casts[0], layouts),
        **flags,
    )


def _operands(
    inputs: BackwardInputs, joined: bool
) -> tuple[tuple[Tensor | None, ...], list[int], dict[str, Any]]:
    """Return tensors and strides of the inputs, in the kernels' argument order, and their flags."""
    grad, gate, gate_scale, up, up_scale, out_dtype = inputs
    strides = [*grad.stride()]
    for x, scale in ((gate, gate_scale), (up, up_scale)):
        strides += [*x.stride(), *((0, 0) if scale is None else scale.stride())]
    flags = {
        "OUT": TYPES[out_dtype],
        "GATE_SAVED": gate_scale is not None,
        "UP_SAVED": up_scale is not None,
        "JOINED": joined,
        "BLOCK_R": ROWS,
        "BLOCK_C": BLOCK,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    return (grad, gate, gate_scale, up, up_scale), strides, flags

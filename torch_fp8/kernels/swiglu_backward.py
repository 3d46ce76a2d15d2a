"""SwiGLU's backward on CUDA: `torch_fp8.ops.swiglu_backward`, up to the last bits of exp.

What each reads and writes, per element of BF16, is: `swiglu_backward_quantize` 2 of the gradient,
2 of saved gate and up, and 2 for each layout; `swiglu_backward_amax` 4 of the same.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions, DelayedCastOptions
from torch_fp8.kernels.fused_launch import (
    TYPES,
    Cast,
    amax_bits,
    as_amax,
    cast_unfused,
    registers,
)
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import BLOCK, pointers, quantize_2d
from torch_fp8.kernels.swiglu import ROWS, WARPS, is_fused, tile
from torch_fp8.kernels.swiglu_backward_kernels import (
    swiglu_backward_cast_kernel,
    swiglu_backward_kernel,
)


def swiglu_backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward`."""
    dgate, dup = _room(inputs), _room(inputs)
    store_gradients(inputs, dgate, dup, None)
    return dgate, dup


def swiglu_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_amax`."""
    largest = amax_bits(inputs.grad, 2)
    store_gradients(inputs, None, None, largest)
    return largest.view(torch.float32)


def _room(inputs: BackwardInputs) -> Tensor:
    """Allocate dgate or dup."""
    return inputs.grad.new_empty(inputs.grad.shape, dtype=inputs.out_dtype)


def _operands(
    inputs: BackwardInputs, unused: Tensor
) -> tuple[list[Tensor], list[int], dict[str, object]]:
    """Return pointers, strides and flags of backward's inputs, in the order of its kernels."""
    grad, gate, gate_scale, up, up_scale, smooth, out_dtype = inputs
    strides = [*grad.stride()]
    for x, scale in ((gate, gate_scale), (up, up_scale)):
        strides += [*x.stride(), *((0, 0) if scale is None else scale.stride())]
    strides.append(0 if smooth is None else smooth.stride(0))
    flags = {
        "OUT": TYPES[out_dtype],
        "SMOOTH": smooth is not None,
        "GATE_SAVED": gate_scale is not None,
        "UP_SAVED": up_scale is not None,
    }
    return pointers((grad, gate, gate_scale, up, up_scale, smooth), unused), strides, flags


def store_gradients(
    inputs: BackwardInputs,
    dgate: Tensor | None,
    dup: Tensor | None,
    largest: Tensor | None,
    joined: bool = False,
) -> None:
    """Compute and store both gradients, or their amaxes, or all of these.

    Args:
        dgate, dup: (R, C) contiguous, or, `joined`, the halves of the rows of a matrix.
        largest: int32 bits, two, or `joined` one.
    """
    grad = inputs.grad
    rows, cols = grad.shape
    if not grad.numel():
        return
    unused = grad if dgate is None else dgate
    operands, strides, flags = _operands(inputs, unused)
    with torch.cuda.device_of(grad):
        swiglu_backward_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
            *operands,
            *pointers((dgate, dup, largest), unused),
            *strides,
            rows,
            cols,
            **flags,
            JOINED=joined,
            STORE=dgate is not None,
            AMAX=largest is not None,
            BLOCK_R=ROWS,
            BLOCK_C=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def swiglu_backward_quantize(
    inputs: BackwardInputs, options: CastOptions
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_quantize`."""
    grad, cast = inputs.grad, Cast(options)
    largest = cast.amax_bits(grad, 2)
    if is_fused(cast, grad, inputs.gate, inputs.up):
        made = (*options.new_layouts(grad), *options.new_layouts(grad))
        cast_gradients(inputs, cast, made, largest)
    else:
        dgate, dup = _room(inputs), _room(inputs)
        store_gradients(inputs, dgate, dup, largest)
        made = (*quantize_2d(dgate, options.part(0)), *quantize_2d(dup, options.part(1)))
    return (*made, as_amax(largest))


def swiglu_backward_quantize_delayed(
    inputs: BackwardInputs, up_amaxes: Tensor, up_progress: Tensor, of_gate: DelayedCastOptions
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_quantize_delayed`."""
    grad, cast = inputs.grad, Cast.of(of_gate)
    of_up = of_gate._replace(amaxes=up_amaxes, progress=up_progress)
    if is_fused(cast, grad, inputs.gate, inputs.up):
        taken = cast.amax_bits(grad, 2)
        made = (*cast.options.new_layouts(grad), *cast.options.new_layouts(grad))
        cast_gradients(inputs, cast, made, taken, up_past=of_up)
        return (*made[:3], *made[4:7], as_amax(taken))
    largest = amax_bits(grad, 2)
    gradients = _room(inputs), _room(inputs)
    store_gradients(inputs, *gradients, largest)
    amaxes = largest.view(torch.float32)
    results: list[Tensor | None] = []
    for d, how, amax in zip(gradients, (of_gate, of_up), amaxes.unbind(), strict=True):
        results += cast_unfused(d, how, amax)[:3]
    return (*results, amaxes)


def cast_gradients(
    inputs: BackwardInputs,
    cast: Cast,
    made: Sequence[Tensor | None],
    largest: Tensor | None,
    joined: bool = False,
    up_past: DelayedCastOptions | None = None,
) -> None:
    """Fill the layouts of both gradients, and their amaxes where the scale was given or delayed.

    Args:
        made: ``(q, s, qt, st)`` of dgate and of dup; `joined`, views of those of one matrix.
        largest: see `store_gradients`.
        up_past: the history of dup's scale; None: that of dgate.
    """
    grad = inputs.grad
    rows, cols = grad.shape
    operands, strides, flags = _operands(inputs, grad)
    source = cast.source(grad)
    gate_past, (length, headroom) = cast.history(grad)[:2], cast.history(grad)[2:]
    past = gate_past if up_past is None else (up_past.amaxes, up_past.progress)
    block_r, warps, maxnreg = tile(cast, rows)
    if rows % 16:  # a mask more than there are registers for two programs at a time
        maxnreg = registers(warps)
    with torch.cuda.device_of(grad):
        swiglu_backward_cast_kernel[(2 * cdiv(rows, block_r) * cdiv(cols, BLOCK),)](
            *operands,
            source,
            *pointers((largest, *made), grad),
            *gate_past,
            *past,
            length,
            headroom,
            *strides,
            source.stride(0) if source.ndim == 1 else 0,
            rows,
            cols,
            **flags,
            JOINED=joined,
            AMAX=cast.options.scale is not None,
            **cast.flags(),
            BLOCK_R=block_r,
            BLOCK_C=BLOCK,
            num_warps=warps,
            maxnreg=maxnreg,
            enable_fp_fusion=False,
        )

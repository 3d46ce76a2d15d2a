"""SwiGLU's backward on CUDA: `torch_fp8.ops.swiglu_backward`, up to the last bits of exp.

What each reads and writes, per element of BF16, is: `swiglu_backward_quantize` 2 of the gradient,
2 of saved gate and up, and 2 for each layout; `swiglu_backward_amax` 4 of the same.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, ProducerCast, casts_of_both
from torch_fp8.kernels.fused_launch import (
    TYPES,
    Cast,
    amax_bits,
    as_amax,
    cast_unfused,
    registers,
)
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import BLOCK, pointers
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
    inputs: BackwardInputs,
    options: ProducerCast,
    up_amaxes: Tensor | None = None,
    up_progress: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_quantize`."""
    grad, cast = inputs.grad, Cast.of(options)
    if is_fused(cast, grad, inputs.gate, inputs.up):
        largest = cast.amax_bits(grad, 2)
        made = (*cast.options.new_layouts(grad), *cast.options.new_layouts(grad))
        past = None if up_amaxes is None else (up_amaxes, up_progress)
        cast_gradients(inputs, cast, made, largest, up_past=past)
        return (*made, as_amax(largest))
    dgate, dup = _room(inputs), _room(inputs)
    largest = amax_bits(grad, 2) if cast.takes_amax else None
    store_gradients(inputs, dgate, dup, largest)
    amaxes = as_amax(largest)
    of_dgate, of_dup = (None, None) if amaxes is None else amaxes.unbind()
    how, how_up = casts_of_both(options, up_amaxes, up_progress)
    return (*cast_unfused(dgate, how, of_dgate), *cast_unfused(dup, how_up, of_dup), amaxes)


def cast_gradients(
    inputs: BackwardInputs,
    cast: Cast,
    made: Sequence[Tensor | None],
    largest: Tensor | None,
    joined: bool = False,
    up_past: tuple[Tensor | None, Tensor | None] | None = None,
) -> None:
    """Fill the layouts of both gradients, and their amaxes where the scale was given or delayed.

    Args:
        made: ``(q, s, qt, st)`` of dgate and of dup; `joined`, views of those of one matrix.
        largest: see `store_gradients`.
        up_past: amaxes and progress of the history of dup's scale; None: those of dgate's.
    """
    grad = inputs.grad
    rows, cols = grad.shape
    operands, strides, flags = _operands(inputs, grad)
    source = cast.source(grad)
    gate_past, (length, headroom) = cast.history(grad)[:2], cast.history(grad)[2:]
    block_r, warps, maxnreg = tile(cast, rows)
    if rows % 16:  # a mask more than there are registers for two programs at a time
        maxnreg = registers(warps)
    with torch.cuda.device_of(grad):
        swiglu_backward_cast_kernel[(2 * cdiv(rows, block_r) * cdiv(cols, BLOCK),)](
            *operands,
            source,
            *pointers((largest, *made), grad),
            *gate_past,
            *(up_past or gate_past),
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

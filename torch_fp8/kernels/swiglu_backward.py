"""SwiGLU's backward on CUDA: `torch_fp8.ops.swiglu_backward`, up to the last bits of exp.

Memory traffic in bytes per BF16 element: `swiglu_backward_quantize` reads 2 of the gradient and 2
of saved gate and up, and writes 2 per layout; `swiglu_backward_amax` reads the same 4.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    amax_slot,
    pointers,
)
from torch_fp8.kernels.fused_launch import (
    TYPES,
    amax_bits,
    fused_flags,
    scale_source,
)
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import (
    quantize_2d,
)
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
    """Return pointers, strides and flags of the inputs, in the kernels' argument order."""
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
    options: CastOptions,
    dup_scale: Tensor | None = None,
    dup_amax: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_quantize`."""
    grad, casts = inputs.grad, options.of_gradients(dup_scale, dup_amax)
    if casts_at_once(inputs, options):
        made = tuple(t for how in casts for t in how.new_layouts(grad))
        cast_gradients(inputs, casts, made)
        return made
    gradients = swiglu_backward(inputs)
    return tuple(t for d, how in zip(gradients, casts, strict=True) for t in quantize_2d(d, how))


def casts_at_once(inputs: BackwardInputs, options: CastOptions) -> bool:
    """Return whether one launch can compute and cast both gradients.

    Registers cannot hold both for a tile of 128 rows.
    """
    fits = is_fused(options, inputs.grad, inputs.gate, inputs.up)
    return fits and tile(options)[0] < BLOCK


def cast_gradients(
    inputs: BackwardInputs,
    casts: Sequence[CastOptions],
    made: Sequence[Tensor | None],
    joined: bool = False,
) -> None:
    """Fill the layouts of both gradients, and raise their amaxes if the options have slots.

    Args:
        casts: cast options of dgate and dup, which differ only in scale and amax.
        made: ``(q, s, qt, st)`` of dgate, then of dup; if `joined`, views of those of one matrix.
        joined: whether both gradients are parts of one matrix.
    """
    grad, options = inputs.grad, casts[0]
    rows, cols = grad.shape
    operands, strides, flags = _operands(inputs, grad)
    with torch.cuda.device_of(grad):
        swiglu_backward_cast_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
            *operands,
            *(scale_source(how, grad) for how in casts),
            *pointers((*(amax_slot(how) for how in casts), *made), grad),
            *strides,
            rows,
            cols,
            **flags,
            JOINED=joined,
            AMAX=options.raises_amax,
            **fused_flags(options),
            BLOCK_R=ROWS,
            BLOCK_C=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )

"""SwiGLU's backward that emits FP8: ``dgate`` and ``dup`` of ``h = silu(gate) * up``.

The rules of `torch_fp8.ops.swiglu` apply. The layer that reads ``h * smooth`` multiplies the
gradient of h by the factors. Gradients are rounded to `out_dtype` and then cast.

If gate and up are the halves of one linear layer's output, forward reads them as two strided views,
but backward must return one gradient, (R, 2 C), and a tensorwise scale covers both halves. The
operators ``gate_up_*`` write both halves into one buffer, plain or in FP8, which the layer's dgrad
and wgrad read directly. The bytes equal those of the two gradients side by side, cast by
``torch_fp8::quantize_2d``.

Legend: R rows (tokens), C columns of gate and of up; `inputs` of all operators: see
`BackwardInputs`. Results are contiguous.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.ops.quantize import quantize_2d, saved_values
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.payload_shape import Layouts
from torch_fp8.quantization.scaling import tensor_amax


@operator(
    lambda inputs: tuple(x.new_empty(x.shape, dtype=inputs.out_dtype) for x in [inputs.grad] * 2)
)
def swiglu_backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Compute ``dgate = grad * up * (sig + gate * sig * (1 - sig))``, ``dup = grad * gate * sig``.

    Here ``sig = sigmoid(gate)``; all in one read.

    Returns:
        dgate and dup, (R, C) of `inputs.out_dtype`.
    """
    grad, gate, gate_scale, up, up_scale, out_dtype = inputs
    g, u = saved_values(gate, gate_scale), saved_values(up, up_scale)
    dh = grad.float()
    sig = g.sigmoid()
    silu = g * sig
    dgate, dup = dh * u * (sig + silu * (1 - sig)), dh * silu
    return dgate.to(out_dtype).contiguous(), dup.to(out_dtype).contiguous()


@operator(lambda inputs: inputs.grad.new_empty(2, dtype=torch.float32))
def swiglu_backward_amax(inputs: BackwardInputs) -> Tensor:
    """Compute the amaxes, (2,) float32, of `swiglu_backward` without writing its results."""
    return torch.stack([tensor_amax(d) for d in swiglu_backward.reference(inputs)])


def _quantize_fake(
    inputs: BackwardInputs, options: CastOptions, *of_up: Tensor | None
) -> tuple[Tensor | None, ...]:
    casts = options.of_gradients(*of_up)
    return tuple(t for cast in casts for t in cast.new_layouts(inputs.grad))


@operator(_quantize_fake, results=8)
def swiglu_backward_quantize(
    inputs: BackwardInputs,
    options: CastOptions,
    dup_scale: Tensor | None = None,
    dup_amax: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Cast `swiglu_backward` to FP8 in the requested layouts, in one read (rowwise: unfused).

    Args:
        inputs: see `BackwardInputs`.
        options: the cast; tensorwise with the amaxes (2,) of `swiglu_backward_amax`, or with the
            scale of dgate, whose slot is raised to the amax.
        dup_scale, dup_amax: the scale and the slot of dup, if dgate's scale is given.
    Returns:
        ``(q, s, qt, st)`` of dgate, then the same of dup: eight results.
    """
    gradients, casts = swiglu_backward.reference(inputs), options.of_gradients(dup_scale, dup_amax)
    return tuple(t for d, cast in zip(gradients, casts, strict=True) for t in quantize_2d(d, cast))


def halves(both: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up, (..., C), as views of `both` (..., 2 C)."""
    first, second = both.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


@operator(lambda inputs, _: inputs.grad.repeat(1, 2).to(inputs.out_dtype))
def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """Compute both results of `swiglu_backward` in one matrix, (R, 2 C) of `inputs.out_dtype`.

    Args:
        inputs: see `BackwardInputs`.
        gate_first: whether dgate is the first half of each row.
    """
    dgate, dup = swiglu_backward.reference(inputs)
    return torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=1)


@operator(lambda inputs: inputs.grad.new_empty((), dtype=torch.float32))
def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """Compute the amax, () float32, of the result of `gate_up_backward` without writing that."""
    return tensor_amax(gate_up_backward.reference(inputs, True))


@operator(lambda inputs, _, options: options.new_layouts(inputs.grad, 2 * inputs.grad.shape[1]))
def gate_up_backward_quantize(
    inputs: BackwardInputs, gate_first: bool, options: CastOptions
) -> Layouts:
    """Cast `gate_up_backward` to FP8 in the requested layouts, in one read.

    On CUDA this is not fused for rowwise casts, if C is not a multiple of 16, and for blocks if C
    is not a multiple of 128, because a block would then contain parts of both halves.

    Args:
        inputs: see `BackwardInputs`.
        gate_first: see `gate_up_backward`.
        options: the cast; tensorwise with the amax of `gate_up_backward_amax`, or with a scale,
            whose slot is raised to the amax of both halves.
    Returns:
        See `Layouts`.
    """
    return quantize_2d(gate_up_backward.reference(inputs, gate_first), options)

"""SwiGLU that emits FP8: ``h = silu(gate) * up``, or ``h * smooth``.

Shazeer, arXiv 2002.05202; ``silu(g) = g * sigmoid(g)``. Smooth-SwiGLU (arXiv 2409.12517 section 4)
multiplies every channel of h by a factor that keeps its outliers within FP8's range, and divides
the next weight's column by it. `smooth` is that factor; backward treats it as a constant.

Arithmetic is float32; h is rounded once to the dtype of gate, as in a gated MLP that returns it,
and then cast, so the bytes equal those of the rounded h cast by ``torch_fp8::quantize_2d``.

Every operator is plain torch on the CPU and a Triton kernel on CUDA. Both round the same values to
the same bytes. exp differs in its last bits between a CPU's library and a GPU, so now and then h is
the neighbouring BF16 value, and rarely its FP8 code differs, too.

Legend: R rows (tokens), C columns (features). Inputs have any strides, results are contiguous.
"""

from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import quantize_2d, save_input, save_inputs
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.payload_shape import new_scale
from torch_fp8.quantization.scaling import tensor_amax


@operator(lambda gate, up, smooth: gate.new_empty(gate.shape))
def swiglu(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    """Compute ``silu(gate) * up``, times `smooth` if given: (R, C) of gate's dtype, rounded once.

    Args:
        gate, up: (R, C) float32, bfloat16 or float16, of one dtype.
        smooth: (C,) float32 factor of each channel, or None.
    """
    g = gate.float()
    h = g * g.sigmoid() * up.float()
    return (h if smooth is None else h * smooth).to(gate.dtype).contiguous()


@operator(lambda gate, up, _, save=True: (*save_inputs(save, gate, up), new_scale(gate)))
def swiglu_save(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Save gate and up for backward, and compute the amax of h, in one read.

    Args:
        gate, up, smooth: see `swiglu`.
        save: whether to save gate and up; otherwise only the amax is computed.
    Returns:
        gate in E4M3 (R, C) and its power-of-two scale (R, ceil(C / 128)), the same of up, all None
        unless `save`; amax () float32, NaN if any element of h is NaN.
    """
    amax = tensor_amax(swiglu.reference(gate, up, smooth))
    return (*save_input(gate, save), *save_input(up, save), amax)


@operator(
    lambda gate, up, _, options, save: (*options.new_layouts(gate), *save_inputs(save, gate, up)),
    results=8,
)
def swiglu_quantize(
    gate: Tensor, up: Tensor, smooth: Tensor | None, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """Cast `swiglu` to FP8 in the requested layouts, in one read (rowwise: unfused).

    Args:
        gate, up, smooth: see `swiglu`.
        options: the cast; tensorwise with the amax of `swiglu_save`; with a scale, whose slot is
            raised to the amax of h; or with neither: the amax is computed first, on CUDA in the
            same launch if one program holds all of h.
        save: whether to return gate and up as `swiglu_save` does, from the same read.
    Returns:
        ``(q, s, qt, st, gate_q, gate_s, up_q, up_s)``; for the first four see
        `torch_fp8.ops.quantize.quantize_2d`.
    """
    results = quantize_2d(swiglu.reference(gate, up, smooth), options)
    return (*results, *save_inputs(save, gate, up))

"""What RMSNorm and SwiGLU that emit FP8 share: the cast of their result, and what they save.

Legend: R rows, C columns. Layouts are those of ``torch_fp8::quantize_2d``: ``(q, s, qt, st)`` is
y quantized along C, its scale, y^T quantized along R, its scale. A tensorwise scale is known before
the cast, as `scale` or as `amax`, or comes from the amaxes of the past, see `DelayedCastOptions`:
a producer that computes its result in order to find the maximum computes it twice, unless one
program holds all of it. Producers of the forward, which meet a few tokens, do find it.
"""

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import stand_in
from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions, ProducerCast
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize_2d
from torch_fp8.quantization.formats import E4M3, format_of
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import Granularity
from torch_fp8.quantization.scaling import delayed_scale, scale_from_amax, tensor_amax

CastResult = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""``(q, s, qt, st, amax)``: layouts, and the amax () float32 where a scale was given or a history
suggests it, for histories want it; None for what was not asked for or taken.
"""
SAVED: Granularity = "block_1x128"
"""The granularity of tensors saved for backward: E4M3 along C with power-of-two scales (COAT's
groups, arXiv 2410.19313 section 4, with Hopper's block length).
"""


def check_scale(options: CastOptions, finds_amax: bool = False) -> None:
    """Raise ValueError unless a tensorwise scale is known in one way, and no other is given.

    Args:
        finds_amax: whether the producer makes a tensorwise scale of which nothing is known.
    """
    granularity = options.granularity
    given = (options.amax is not None) + (options.scale is not None)
    if granularity == "tensorwise" and given != 1 and not (finds_amax and not given):
        raise ValueError("a tensorwise producer takes either amax or scale")
    if granularity != "tensorwise" and given:
        raise ValueError(f"{granularity} scales are made from the tensor, got amax or scale")


def cast_result(y: Tensor, options: ProducerCast, finds_amax: bool = False) -> CastResult:
    """Cast y (R, C), of any strides.

    Args:
        options: how; tensorwise with a scale, which is used as it is, an amax or a history.
        finds_amax: whether tensorwise may have none of them, and the scale is made from y's amax.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    if isinstance(options, DelayedCastOptions):
        amax, format = tensor_amax(y), format_of(options.dtype)
        made = delayed_scale(options.amaxes, amax, format, options.algorithm, options.margin)
        q, _, qt, st = quantize_2d(y, options.with_scale(made))
        return q, made, qt, st, amax
    check_scale(options, finds_amax)
    if options.amax is not None:
        made = scale_from_amax(options.amax, format_of(options.dtype), options.power_of_two)
        q, _, qt, st = quantize_2d(y, options._replace(scale=made, amax=None))
        return q, made, qt, st, None
    return *quantize_2d(y, options), None if options.scale is None else tensor_amax(y)


def cast_result_fake(y: Tensor, options: ProducerCast, finds_amax: bool = False) -> CastResult:
    """Return empty tensors of the shapes of `cast_result`, which refuses as that does."""
    amax = y.new_empty((), dtype=torch.float32)
    if isinstance(options, DelayedCastOptions):
        return *options.with_scale(None).new_layouts(y), amax
    check_scale(options, finds_amax)
    return *options.new_layouts(y), None if options.scale is None else amax


def save_input(x: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Return x as backward needs it, if it is wanted: E4M3 (R, C), scale (R, ceil(C / 128))."""
    q, s, *_ = cast_result(x, CastOptions(E4M3.dtype, SAVED, True, wanted, False))
    return q, s


def saved_stand_ins(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what stands for `save_input` of x, (R, C), where nothing is saved."""
    shape = scale_shape(x.shape[0], x.shape[1], SAVED)
    return stand_in(x.shape, E4M3.dtype, x), stand_in(shape, torch.float32, x)


def saved_values(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return a saved tensor, FP8 with its scale or plain with None, as float32 (R, C)."""
    return x.float() if scale is None else dequantize(QuantizedTensor(x, scale, SAVED))

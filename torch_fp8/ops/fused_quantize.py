"""The common part of the RMSNorm and SwiGLU operators that emit FP8: casts, and saved tensors.

Legend: R rows, C columns. Layouts are those of ``torch_fp8::quantize_2d``: ``(q, s, qt, st)`` is y
quantized along C, its scale, y^T quantized along R, and its scale. A tensorwise scale is known
before the cast, from `scale` or `amax`. A producer that computes its result to find the maximum
computes it twice, unless one program holds all of it. Forward producers do find the maximum for
small numbers of tokens.
"""

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import stand_in
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize_2d
from torch_fp8.quantization.formats import E4M3
from torch_fp8.quantization.payload_shape import Layouts, scale_shape
from torch_fp8.quantization.recipe import Granularity

SAVED: Granularity = "block_1x128"
"""The granularity of tensors saved for backward: E4M3 along C with power-of-two scales (COAT's
groups, arXiv 2410.19313 section 4, with Hopper's block length).
"""


def check_scale(options: CastOptions, finds_amax: bool = False) -> None:
    """Raise ValueError unless a tensorwise cast has a scale or amax, and other casts have none.

    Args:
        options: the cast.
        finds_amax: whether the producer can compute a missing tensorwise scale itself.
    """
    granularity = options.granularity
    is_known = options.amax is not None or options.scale is not None
    if granularity == "tensorwise" and not (is_known or finds_amax):
        raise ValueError("a tensorwise producer takes amax or scale")
    if granularity != "tensorwise" and is_known:
        raise ValueError(f"{granularity} scales are made from the tensor, got amax or scale")


def cast_result(y: Tensor, options: CastOptions, finds_amax: bool = False) -> Layouts:
    """Cast y (R, C), of any strides.

    Args:
        y: the result of a producer.
        options: the cast; tensorwise with an amax, or with a scale, which is used as it is; a slot
            beside the scale is raised to y's amax.
        finds_amax: whether a tensorwise cast may have neither, and computes the scale from y's
            amax.
    Raises:
        ValueError: if a tensorwise cast has neither amax nor scale, or another one has any.
    """
    check_scale(options, finds_amax)
    return quantize_2d(y, options)


def cast_result_fake(y: Tensor, options: CastOptions, finds_amax: bool = False) -> Layouts:
    """Return empty tensors of the shapes of `cast_result`; raises the same errors."""
    check_scale(options, finds_amax)
    return options.new_layouts(y)


def save_input(x: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Return x as saved for backward: E4M3 (R, C) and scale (R, ceil(C / 128)), or None if not
    wanted.
    """
    q, s, *_ = cast_result(x, CastOptions(E4M3.dtype, SAVED, True, wanted, False))
    return q, s


def saved_stand_ins(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return placeholders for the results of `save_input`, (R, C), if nothing is saved."""
    shape = scale_shape(x.shape[0], x.shape[1], SAVED)
    return stand_in(x.shape, E4M3.dtype, x), stand_in(shape, torch.float32, x)


def saved_values(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return a saved tensor (FP8 with its scale, or plain with None) as float32 (R, C)."""
    return x.float() if scale is None else dequantize(QuantizedTensor(x, scale, SAVED))

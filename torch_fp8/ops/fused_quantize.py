"""What RMSNorm and SwiGLU that emit FP8 share: the cast of their result, and what they save.

Legend: R rows, C columns. Layouts are those of ``torch_fp8::quantize_2d``: ``(q, s, qt, st)`` is
y quantized along C, its scale, y^T quantized along R, its scale; what was not asked for is an
empty tensor. A tensorwise scale must be known before the cast, as `scale` or as `amax`: a producer
that computed its result in order to find the maximum would compute it twice. Or it comes from the
amaxes of the past, see `DelayedCast`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.autograd.checkpoint_pass import stand_in
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, emulates_casts
from torch_fp8.ops.registry import define
from torch_fp8.quantization.formats import E4M3, format_of
from torch_fp8.quantization.payload_shape import Layouts, scale_shape
from torch_fp8.quantization.recipe import Granularity
from torch_fp8.quantization.scaling import delayed_scale, scale_from_amax, tensor_amax

SAVED: Granularity = "block_1x128"
"""The granularity of tensors saved for backward: E4M3 along C with power-of-two scales (COAT's
groups, arXiv 2410.19313 section 4, with Hopper's block length).
"""


class DelayedCast(NamedTuple):
    """A tensorwise cast with the scale that a history suggests, which takes the amax in the same
    read.

    The history stays as it is: each reader of the result records the amax in its own history.

    Attributes:
        amaxes: (H,) float32, the most recent first; 0 where nothing was recorded yet.
        progress: (2,) int32, zeros; written on CUDA, and zeros again afterwards: to schemas it is
            not written, so that a graph can drop what nobody reads.
        dtype: float8_e4m3fn or float8_e5m2.
        algorithm, margin: see `torch_fp8.quantization.scaling.delayed_scale`.
        row, col: the layouts to make.
    """

    amaxes: Tensor
    progress: Tensor
    dtype: torch.dtype
    algorithm: str
    margin: int
    row: bool
    col: bool

    def reference(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(q, scale, qt, amax)`` of y (R, C); scale and amax are () float32."""
        amax = tensor_amax(y)
        scale = delayed_scale(self.amaxes, amax, format_of(self.dtype), self.algorithm, self.margin)
        q, _, qt, _ = cast_result(
            y, None, scale, self.dtype, "tensorwise", False, self.row, self.col
        )
        return q, scale, qt, amax

    def fake(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return empty tensors of the shapes of `reference`."""
        scale, amax = (y.new_empty((), dtype=torch.float32) for _ in range(2))
        q, _, qt, _ = cast_result(
            y, None, scale, self.dtype, "tensorwise", False, self.row, self.col
        )
        return q, scale, qt, amax


CAST_ARGUMENTS = (
    "Tensor? amax, Tensor? scale, ScalarType dtype, str granularity, bool power_of_two, "
    "bool row, bool col"
)
"""The schema of the arguments by which an operator casts, as those of `cast_result`."""
DELAYED_ARGUMENTS = (
    "Tensor amaxes, Tensor progress, ScalarType dtype, str algorithm, int margin, "
    "bool row, bool col"
)
"""The schema of the fields of `DelayedCast`, as arguments of an operator."""


def check_scale(granularity: str, amax: Tensor | None, scale: Tensor | None) -> None:
    """Raise ValueError unless a tensorwise scale is known in exactly one way, and no other is
    given.
    """
    given = (amax is not None) + (scale is not None)
    if granularity == "tensorwise" and given != 1:
        raise ValueError("a tensorwise producer takes either amax or scale")
    if granularity != "tensorwise" and given:
        raise ValueError(f"{granularity} scales are made from the tensor, got amax or scale")


def cast_result(
    y: Tensor,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> Layouts:
    """Cast y in the layouts asked for: for references, and with empty tensors for fakes.

    Args:
        y: (R, C), any strides.
        amax: () float32, at least that of y: tensorwise, the scale is made from it.
        scale: () float32 dequantization scale: tensorwise, it is used as it is.
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: see `torch_fp8.quantization.recipe`.
        power_of_two: round scales up to powers of two.
        row, col: the layouts to make.
    Returns:
        Layouts; tensorwise, s is () if it was made here and empty if it was given, st is empty.
    """
    check_scale(granularity, amax, scale)
    made = None if amax is None else scale_from_amax(amax, format_of(dtype), power_of_two)
    q, s, qt, st = torch.ops.torch_fp8.quantize_2d(
        y, scale if made is None else made, dtype, granularity, power_of_two, row, col
    )
    return q, s if made is None else made, qt, st


def save_input(x: Tensor, wanted: bool = True) -> tuple[Tensor, Tensor]:
    """Return x as backward needs it: E4M3 (R, C), scale (R, ceil(C / 128)); else empty tensors."""
    q, s, _, _ = cast_result(x, None, None, E4M3.dtype, SAVED, True, wanted, False)
    return q, s


def saved_stand_ins(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what stands for `save_input` of x, (R, C), where nothing is saved."""
    shape = scale_shape(x.shape[0], x.shape[1], SAVED)
    return stand_in(x.shape, E4M3.dtype, x), stand_in(shape, torch.float32, x)


def saved_values(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return a saved tensor, FP8 with its scale or plain with None, as float32 (R, C)."""
    return x.float() if scale is None else dequantize(QuantizedTensor(x, scale, SAVED))


def no_amax(x: Tensor) -> Tensor:
    """Return the empty tensor that stands for an amax that was not asked for."""
    return x.new_empty(0, dtype=torch.float32)


def register(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    kernels: Callable[[], Any],
) -> None:
    """Define an operator: its reference on the CPU, its kernels on CUDA, its fake for tracing.

    Args:
        schema: as for `torch.library.Library.define`; the first argument is a tensor.
        reference, fake: take and return what the schema says.
        kernels: returns the module whose function of the operator's name launches its kernels; it
            is asked only where they run, for Triton is imported there.
    """
    name = schema.partition("(")[0]

    def cuda(x: Tensor, *args: Any) -> Any:
        if emulates_casts(x.device):
            return reference(x, *args)
        return getattr(kernels(), name)(x, *args)

    define(schema, reference, cuda, fake)

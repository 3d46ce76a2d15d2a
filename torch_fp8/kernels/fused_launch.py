"""What the launchers of fused producers share: outputs, and stand-ins for absent tensors.

Legend: R rows, C columns of the result; rowwise is it quantized along C, columnwise its transpose
quantized along R.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions, ProducerCast
from torch_fp8.kernels.quantize import BLOCK, cast_flags, quantize_2d
from torch_fp8.kernels.quantize_delayed import advance_history
from torch_fp8.quantization.payload_shape import (
    COL_ALIGNMENT,
    Layouts,
    new_group_scales,
)

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
GROUPS = {"block_1x128": 128, "block_1x32": 32}


class Cast(NamedTuple):
    """How a result is cast by the kernel that computes it.

    Attributes:
        options: the cast; with a history, still without a scale.
        past: None, or where the scale comes from; of several results, the first one's.
    """

    options: CastOptions
    past: DelayedCastOptions | None = None

    @classmethod
    def of(cls, options: ProducerCast) -> "Cast":
        """Build the cast that an operator is told."""
        if isinstance(options, DelayedCastOptions):
            return cls(options.with_scale(None), options)
        return cls(options)

    @property
    def takes_amax(self) -> bool:
        """Whether the amax is taken, where the scale was given or is delayed."""
        return self.past is not None or self.options.scale is not None

    @property
    def needs_amax(self) -> bool:
        """Whether a tensorwise scale is made of the result's amax, which all of it decides."""
        return self.past is None and self.options.needs_amax

    def is_fused(self, *inputs: Tensor) -> bool:
        """Return whether one launch computes the result and casts it in tiles.

        A rowwise scale belongs to more than a tile. Columns that are no multiple of 16 are moved
        one element at a time, each with an address and a mask in registers, and FP8 GEMMs do not
        take them: these are computed first and cast then. Rows may be any number, but where the
        column layout has squares and no padding.
        """
        granularity = self.options.granularity
        given = (self.options.amax, self.options.scale, self.past)
        assert sum(how is not None for how in given) <= (granularity == "tensorwise")
        rows, cols = inputs[0].shape
        unpadded = self.options.columnwise and COL_ALIGNMENT[granularity] == 1
        odd = cols % 16 or (unpadded and rows % 16) or any(x.stride(1) != 1 for x in inputs)
        return granularity != "rowwise" and not odd and inputs[0].numel() > 0

    def source(self, unused: Tensor) -> Tensor:
        """Return the tensor from which `tiles.store_cast` reads the scale."""
        if self.options.amax is not None:
            return self.options.amax.view(torch.int32)
        return unused if self.options.scale is None else self.options.scale

    def history(self, unused: Tensor) -> tuple[Tensor, Tensor, int, float]:
        """Return amaxes, progress, length and headroom as a kernel takes them."""
        if self.past is None:
            return unused, unused, 0, 1.0
        past = self.past
        return past.amaxes, past.progress, past.amaxes.shape[0], 2.0**past.margin

    def amax_bits(self, x: Tensor, *shape: int) -> Tensor | None:
        """Allocate the bits of amaxes, which are taken where the scale was given or is delayed."""
        if self.past is not None:  # the last program writes them
            return x.new_empty(shape, dtype=torch.int32)
        return None if self.options.scale is None else amax_bits(x, *shape)

    def flags(self, whole: bool = False) -> dict[str, object]:
        """Return the compile-time arguments of a kernel that casts.

        Args:
            whole: whether one tile is all of the result, as a cast without its amax demands.
        """
        assert whole == self.needs_amax
        if self.past is not None:
            source = "recent" if self.past.algorithm == "most_recent" else "history"
        elif whole:
            source = "whole"
        elif self.options.granularity == "tensorwise":
            source = "given" if self.options.amax is None else "amax"
        else:
            source = "square" if self.options.granularity == "block_128x128" else "groups"
        return {
            "SCALE": source,
            "GROUP": GROUPS.get(self.options.granularity, BLOCK),
            **cast_flags(self.options),
        }


def no_cast(made: Layouts) -> dict[str, object]:
    """Return `Cast.flags` of a kernel that stores its result as it is, or stores none."""
    how = {"GROUP": BLOCK, "E5M2": False, "POWER_OF_TWO": False, "COL": False}
    return {"SCALE": "plain", **how, "ROW": made[0] is not None}


def known_cast(options: DelayedCastOptions, amax: Tensor) -> tuple[CastOptions, Tensor]:
    """Return the cast of a result whose amax () is known, and its scale, () float32."""
    amaxes, _, *how = options[:5]
    scale = advance_history(amaxes, None, amax, *how, record=False)
    return options.with_scale(scale), scale


def cast_unfused(y: Tensor, options: ProducerCast, amax: Tensor | None) -> Layouts:
    """Cast a result that has been written to memory.

    Args:
        amax: () float32 of y, where a history suggests the scale.
    """
    if not isinstance(options, DelayedCastOptions):
        return quantize_2d(y, options)
    assert amax is not None
    cast, scale = known_cast(options, amax)
    q, _, qt, st = quantize_2d(y, cast)
    return q, scale, qt, st


def saved_outputs(x: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Allocate x as it is saved for backward, if it is."""
    if not wanted:
        return None, None
    rows, cols = x.shape
    return x.new_empty((rows, cols), dtype=torch.float8_e4m3fn), new_group_scales(x, rows, cols)


def registers(warps: int) -> int:
    """Return the registers of a thread when one program at a time occupies a multiprocessor.

    For kernels that end as `delayed_scale` says, or have one program: left to itself, the assembler
    takes half as many for most of them, so that two programs fit, and spills a few bytes.
    """
    return min(65536 // (32 * warps), 255)


def amax_bits(x: Tensor, *shape: int) -> Tensor:
    """Allocate the bits of amaxes, initialised to 0, for kernels to raise."""
    return x.new_zeros(shape, dtype=torch.int32)


def as_amax(bits: Tensor | None) -> Tensor | None:
    """Return the float32 numbers whose bits these are."""
    return None if bits is None else bits.view(torch.float32)

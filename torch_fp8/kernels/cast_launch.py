"""Tiles and arguments of launches that cast to FP8, shared by casts and fused producers.

Legend: R rows, C columns of x; the column layout is x^T, (C, R).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.launch_math import next_power_of_2
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import COL_ALIGNMENT

BLOCK = 128
# 128 x 128, because it holds whole groups of every block granularity in both directions, and the
# transposed store writes 128 contiguous bytes, a full cache line. With 16 warps each thread has 32
# elements, four 16-byte loads in flight; with 8 warps some variants need more than 200 registers.
TILE_WARPS = 16


class Tile(NamedTuple):
    """The size of the tile that one program works on."""

    rows: int
    cols: int
    warps: int


def whole_tile(x: Tensor, columnwise: bool) -> Tile | None:
    """Return a tile that holds all of x, or None if x does not fit.

    A single program then finds the amax and casts in one launch. This serves generation with few
    tokens, where a launch takes longer than the work in it.
    """
    rows, cols = x.shape
    if not x.numel() or x.numel() > BLOCK * BLOCK or is_odd(x):
        return None
    block_r, block_c = next_power_of_2(rows), max(next_power_of_2(cols), BLOCK)
    if columnwise:  # the tile also writes the padding
        block_r = max(block_r, COL_ALIGNMENT["tensorwise"])
    elements = block_r * block_c
    fits = elements <= BLOCK * BLOCK
    return Tile(block_r, block_c, max(1, min(TILE_WARPS, elements // 512))) if fits else None


def is_odd(x: Tensor) -> bool:
    """Return whether x must be moved one element at a time."""
    return x.shape[1] % 16 != 0 or x.stride(1) != 1


def pad_of(rows: int, granularity: str, pads: bool) -> int:
    """Return a kernel's PAD: 1 if no padding is needed, so that one length and mask suffice."""
    pad = COL_ALIGNMENT[granularity] if pads else 1
    return pad if rows % pad else 1


def amax_slot(options: CastOptions) -> Tensor | None:
    """Return the int32 bits of the amax slot that a cast raises, or None."""
    if options.amax is None or options.scale is None:
        return None
    return options.amax.view(torch.int32)


def cast_flags(options: CastOptions) -> dict[str, object]:
    """Return the compile-time arguments of a kernel that casts, except the scale's source."""
    return {
        "E5M2": format_of(options.dtype).has_inf,
        "POWER_OF_TWO": options.power_of_two or options.granularity == "block_1x32",
        "ROW": options.rowwise,
        "COL": options.columnwise,
    }


def pad_columns(qdata: Tensor | None, granularity: str) -> Tensor | None:
    """Pad a payload of x^T from (C, R) to (C, R'), in a copy."""
    more = 0 if qdata is None else -qdata.shape[1] % COL_ALIGNMENT[granularity]
    if qdata is None or not more:
        return qdata
    return F.pad(qdata.view(torch.uint8), (0, more)).view(qdata.dtype)


def pointers(tensors: Iterable[Tensor | None], unused: Tensor) -> list[Tensor]:
    """Return kernel arguments: FP8 tensors as bytes, and `unused`, never accessed, for None."""
    return [
        unused if t is None else t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        for t in tensors
    ]

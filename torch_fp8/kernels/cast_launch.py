"""Tiles and arguments of launches that cast to FP8: casts, and producers of a result
(norms, activations).

Legend: R rows, C columns of x or of the result; rowwise: quantized along C; columnwise: its
transpose (C, R), quantized along R.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import GRANULARITIES, cdiv, is_known, new_group_scales

BLOCK = 128
# 128 x 128, because it holds whole groups of every block granularity in both directions, and the
# transposed store writes 128 contiguous bytes, a full cache line. With 16 warps each thread has 32
# elements, four 16-byte loads in flight; with 8 warps some variants need more than 200 registers.
TILE_WARPS = 16
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Rows up to this length are read once and kept in registers: 32 elements per thread in 16 warps.
MAX_ROW_IN_REGISTERS = 16384
ROW_CHUNK = 8192


class Tile(NamedTuple):
    """The size of the tile that one program works on."""

    rows: int
    cols: int
    warps: int

    def grid(self, x: Tensor) -> tuple[int]:
        """Return the number of programs for a matrix of x's shape."""
        return (cdiv(x.shape[0], self.rows) * cdiv(x.shape[1], self.cols),)

    @property
    def options(self) -> dict[str, int]:
        """The arguments of a launch that depend on the tile."""
        return {"BLOCK_R": self.rows, "BLOCK_C": self.cols, "num_warps": self.warps}


def whole_rows(cols: int, least: int) -> Tile:
    """Return a tile of rows, each whole if it fits in registers; `least`: its least columns."""
    block_c = max(next_power_of_2(cols), least) if cols <= MAX_ROW_IN_REGISTERS else ROW_CHUNK
    return Tile(max(1, 4096 // block_c), block_c, max(4, block_c // 1024))  # 32 elements a thread


def whole_tile(x: Tensor, columnwise: bool) -> Tile | None:
    """Return a tile that holds all of x, or None if x does not fit.

    A single program then finds the amax and casts in one launch. This serves generation with few
    tokens, where a launch takes longer than the work in it.
    """
    (rows, cols), size = x.shape, x.numel()
    if not is_known(size) or not size or size > BLOCK * BLOCK or is_odd(x):
        return None
    block_r, block_c = next_power_of_2(rows), max(next_power_of_2(cols), BLOCK)
    if columnwise:  # the tile also writes the padding
        block_r = max(block_r, GRANULARITIES["tensorwise"].pads_rows_to)
    elements = block_r * block_c
    fits = elements <= BLOCK * BLOCK
    return Tile(block_r, block_c, max(1, min(TILE_WARPS, elements // 512))) if fits else None


def is_odd(x: Tensor) -> bool:
    """Return whether x must be moved one element at a time."""
    return not is_known(x.shape[1]) or x.shape[1] % 16 != 0 or x.stride(1) != 1


def pad_of(rows: int, granularity: str, pads: bool) -> int:
    """Return a kernel's PAD: 1 if no padding is needed, so that one length and mask suffice."""
    pad = GRANULARITIES[granularity].pads_rows_to if pads else 1
    return pad if not is_known(rows) or rows % pad else 1


def amax_slot(options: CastOptions | None) -> Tensor | None:
    """Return the int32 bits of the amax slot that a cast raises, or None."""
    slot = None if options is None or options.scale is None else options.amax
    return slot if slot is None or slot.dtype == torch.int32 else slot.view(torch.int32)


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
    more = 0 if qdata is None else -qdata.shape[1] % GRANULARITIES[granularity].pads_rows_to
    if qdata is None or not more:
        return qdata
    return F.pad(qdata.view(torch.uint8), (0, more)).view(qdata.dtype)


def pointers(tensors: Iterable[Tensor | None], unused: Tensor) -> list[Tensor]:
    """Return kernel arguments: FP8 tensors as bytes, and `unused`, never accessed, for None.

    In a graph the kernel itself takes them for bytes (`torch_fp8.kernels.quick_launch.Outline`),
    because each view would be a call in each step.
    """
    return [_as_bytes(unused if t is None else t) for t in tensors]


def _as_bytes(x: Tensor) -> Tensor:
    is_plain = x.dtype.itemsize != 1 or isinstance(x, FunctionalTensor)
    return x if is_plain else x.view(torch.uint8)


def fits_tiles(options: CastOptions, *inputs: Tensor) -> bool:
    """Return whether one launch can compute a result and cast it in tiles.

    Rowwise scales span more than a tile. If C is not a multiple of 16, elements move one at a time,
    each with an address and a mask in registers, and FP8 GEMMs reject the result anyway. Both are
    computed first and then cast. R is arbitrary, except for 128 x 128 blocks in the column layout,
    which is not padded.
    """
    granularity = options.granularity
    assert granularity == "tensorwise" or (options.amax is None and options.scale is None)
    rows, cols = inputs[0].shape
    unpadded = options.columnwise and GRANULARITIES[granularity].pads_rows_to == 1
    odd = cols % 16 or (unpadded and rows % 16) or any(x.stride(1) != 1 for x in inputs)
    return granularity != "rowwise" and not odd and inputs[0].numel() > 0


def scale_source(options: CastOptions | None, unused: Tensor) -> Tensor:
    """Return the tensor with the scale, or the bits of the amax, for `tiles.store_cast`."""
    if options is not None and options.scale is not None:
        return options.scale
    if options is None or options.amax is None:
        return unused
    return options.amax.view(torch.int32)


def fused_flags(
    options: CastOptions | None, layouts: Sequence[Tensor | None], whole: bool = False
) -> dict[str, object]:
    """Return the compile-time arguments of a kernel that computes and casts its result.

    Args:
        options: the cast, or None if the first of `layouts` gets the plain result, if it exists.
        layouts: the layouts to fill.
        whole: whether one tile holds the whole result; required if the amax is not known.
    """
    if options is None:
        plain = {"SCALE": "plain", "GROUP": BLOCK, "E5M2": False, "POWER_OF_TWO": False}
        return {**plain, "ROW": layouts[0] is not None, "COL": False}
    assert whole == options.needs_amax
    of_tensor = "whole" if whole else "amax" if options.scale is None else "given"
    sources = {"tensorwise": of_tensor, "block_128x128": "square"}
    return {
        "SCALE": sources.get(options.granularity, "groups"),
        "GROUP": GRANULARITIES[options.granularity].block[1] or BLOCK,
        **cast_flags(options),
    }


def saved_outputs(x: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Allocate codes and scales to save x for backward, or return (None, None)."""
    if not wanted:
        return None, None
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), new_group_scales(x, *x.shape)


def registers(warps: int) -> int:
    """Return the registers per thread if a multiprocessor runs one program at a time.

    This limit is for kernels of a single program, or with one mask too many for their registers.
    Without it the assembler uses half as many for most of them, so that two programs fit, and
    spills a few bytes.
    """
    return min(65536 // (32 * warps), 255)


def amax_bits(x: Tensor, *shape: int) -> Tensor:
    """Allocate int32 bits of amaxes, zeros that kernels raise."""
    return x.new_zeros(shape, dtype=torch.int32)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, for a positive n."""
    return 1 << (n - 1).bit_length()

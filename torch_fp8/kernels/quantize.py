"""Casts to FP8 on CUDA: the twin of `torch_fp8.quantize.quantize_2d_reference`, byte for byte.

Casting is bound by memory, so what matters is how often the matrix is read. Blocks and tensorwise
casts with a known scale read it once and write both layouts from the same tile; a tensorwise scale
from the tensor at hand costs one more read; row scales and column scales of one matrix live in
groups that no tile holds, so the column layout of a rowwise cast reads it twice on its own.

Legend: R rows, C columns of x; ``row`` is x quantized along C, ``col`` is x^T quantized along R.

Launch configurations are fixed, not tuned at run time, so that a run is reproducible and starts
fast. The reasons stand beside them.
"""

import torch
import triton
from torch import Tensor

from torch_fp8.formats import format_of
from torch_fp8.kernels.tiles import (
    amax_kernel,
    cast_kernel,
    column_amax_kernel,
    quantize_blocks_kernel,
    quantize_rows_kernel,
)

BLOCK = 128
# 128 x 128 because it holds whole groups of every block granularity in both directions, and makes
# the transposed store 128 contiguous bytes, a full cache line. 16 warps leave each thread 32
# elements, four 16-byte loads in flight; with 8 warps some variants take more than 200 registers.
TILE_WARPS = 16

# Sizes that are no multiple of 16 are moved one element at a time, each with an address and a mask
# in registers. Casts then work on smaller tiles; blocks cannot, and make one layout per launch (and
# still spill a little where C is odd). FP8 GEMMs take multiples of 16, so this is the rare case.
ODD_BLOCK = 64
ODD_WARPS = 8

# The amax pass only loads: 64 x 128 tiles of 16 kB, and two waves of four CTAs on 132 SMs.
AMAX_ROWS = 64
AMAX_PROGRAMS = 1024

# A row that fits is read once and kept in registers: 16384 elements are 32 per thread in 16 warps.
MAX_ROW_IN_REGISTERS = 16384
ROW_CHUNK = 8192

# Column maxima: partial maxima per slab of rows, as many slabs as it takes to fill the card. The
# cast then reduces at most 32 partials per column: 16 kB from L2 beside its own tile of 32 kB.
COLUMN_PROGRAMS = 512
MAX_SLABS = 32

BLOCK_GRANULARITIES = ("block_1x128", "block_128x128", "block_1x32")

Layout = tuple[Tensor | None, Tensor | None]


def quantize_2d(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Quantize x along its last dimension (row) and x^T along its own (col).

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides.
        scale: () float32, tensorwise only; None: from the amax of x.
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: ``tensorwise``, ``rowwise`` or one of BLOCK_GRANULARITIES.
        power_of_two: round scales up to powers of two; a given scale must be one already.
            Implied by ``block_1x32``.
        row, col: the layouts to make.
    Returns:
        qdata (R, C), its float32 scale, qdata of x^T (C, R), its scale, all contiguous, None for
        what was not asked for. Tensorwise, both scales are the same () tensor.
    """
    if x.stride(1) != 1 and x.stride(0) == 1:  # loads run along the contiguous dimension
        made = quantize_2d(x.t(), scale, dtype, granularity, power_of_two, col, row)
        return (*made[2:], *made[:2])
    with torch.cuda.device_of(x):
        if granularity == "tensorwise":
            return _tensorwise(x, scale, dtype, power_of_two, row, col)
        if granularity == "rowwise":
            by_row = _rows(x, dtype, power_of_two) if row else (None, None)
            by_col = _columns(x, dtype, power_of_two) if col else (None, None)
            return (*by_row, *by_col)
        if granularity in BLOCK_GRANULARITIES:
            return _blocks(x, dtype, granularity, power_of_two, row, col)
    raise ValueError(f"unknown granularity {granularity!r}")


def quantize_with_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, row: bool, col: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast with a known tensorwise scale and take the amax of x in the same read.

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides.
        scale: () float32 dequantization scale.
        dtype: float8_e4m3fn or float8_e5m2.
        row, col: the layouts to make.
    Returns:
        qdata (R, C) or None, qdata of x^T (C, R) or None, amax () float32: NaN if any element is.
    """
    if x.stride(1) != 1 and x.stride(0) == 1:
        by_col, by_row, amax = quantize_with_amax(x.t(), scale, dtype, col, row)
        return by_row, by_col, amax
    amax_bits = x.new_zeros((), dtype=torch.int32)
    with torch.cuda.device_of(x):
        by_row, by_col = _cast_tiles(x, "given", scale, None, dtype, False, row, col, amax_bits)
    return by_row, by_col, amax_bits.view(torch.float32)


def _tensorwise(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if scale is not None:
        by_row, by_col = _cast_tiles(x, "given", scale, None, dtype, False, row, col)
    elif x.numel() == 0:
        scale = torch.ones((), dtype=torch.float32, device=x.device)
        by_row, by_col = _cast_tiles(x, "given", scale, None, dtype, False, row, col)
    else:
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        partial = _partial_amax(x)
        by_row, by_col = _cast_tiles(x, "tensor", scale, partial, dtype, power_of_two, row, col)
    return by_row, scale if row else None, by_col, scale if col else None


def _partial_amax(x: Tensor) -> Tensor:
    """(P,) int32 whose maximum is the bits of the amax of x."""
    rows, cols = x.shape
    num_tiles = triton.cdiv(rows, AMAX_ROWS) * triton.cdiv(cols, BLOCK)
    partial = torch.empty(min(num_tiles, AMAX_PROGRAMS), dtype=torch.int32, device=x.device)
    amax_kernel[(partial.numel(),)](
        x,
        partial,
        x.stride(0),
        x.stride(1),
        rows,
        cols,
        num_tiles,
        BLOCK_R=AMAX_ROWS,
        BLOCK_C=BLOCK,
        num_warps=4,
    )
    return partial


def _columns(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> Layout:
    """x^T (C, R) with a scale per column of x, (C, 1)."""
    rows, cols = x.shape
    if x.numel() == 0:
        return x.new_empty((cols, rows), dtype=dtype), x.new_ones((cols, 1), dtype=torch.float32)
    column_blocks = triton.cdiv(cols, BLOCK)
    slabs = min(triton.cdiv(COLUMN_PROGRAMS, column_blocks), MAX_SLABS, triton.cdiv(rows, BLOCK))
    rows_per_slab = triton.cdiv(triton.cdiv(rows, slabs), AMAX_ROWS) * AMAX_ROWS
    slabs = triton.cdiv(rows, rows_per_slab)
    partial = torch.empty((slabs, cols), dtype=torch.int32, device=x.device)
    column_amax_kernel[(column_blocks, slabs)](
        x,
        partial,
        x.stride(0),
        x.stride(1),
        rows,
        cols,
        rows_per_slab,
        BLOCK_R=AMAX_ROWS,
        BLOCK_C=BLOCK,
        num_warps=4,
    )
    scale = torch.empty((cols, 1), dtype=torch.float32, device=x.device)
    _, by_col = _cast_tiles(x, "columns", scale, partial, dtype, power_of_two, False, True)
    return by_col, scale


def _cast_tiles(
    x: Tensor,
    source: str,
    scale: Tensor,
    partial: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    row: bool,
    col: bool,
    amax_bits: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The payloads; fills `scale` from `partial` unless `source` is "given"."""
    rows, cols = x.shape
    by_row, by_col = _outputs(x, dtype, row, col)
    if x.numel() and (row or col or amax_bits is not None):
        num_partials = 1 if partial is None else partial.shape[0]
        block, warps = (ODD_BLOCK, ODD_WARPS) if _odd(x) else (BLOCK, TILE_WARPS)
        cast_kernel[(triton.cdiv(rows, block) * triton.cdiv(cols, block),)](
            x,
            scale,
            scale if partial is None else partial,
            _bytes(by_row, scale),
            _bytes(by_col, scale),
            scale if amax_bits is None else amax_bits,
            x.stride(0),
            x.stride(1),
            rows,
            cols,
            num_partials,
            SCALE=source,
            E5M2=format_of(dtype).has_inf,
            POWER_OF_TWO=power_of_two,
            ROW=row,
            COL=col,
            AMAX=amax_bits is not None,
            PARTIALS=triton.next_power_of_2(num_partials),
            BLOCK_SIZE=block,
            num_warps=warps,
        )
    return by_row, by_col


def _rows(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> Layout:
    """x with a scale per row, (R, 1)."""
    rows, cols = x.shape
    qdata = x.new_empty((rows, cols), dtype=dtype)
    if x.numel() == 0:
        return qdata, x.new_ones((rows, 1), dtype=torch.float32)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    in_registers = cols <= MAX_ROW_IN_REGISTERS
    block_c = max(triton.next_power_of_2(cols), 16) if in_registers else ROW_CHUNK
    block_r = max(1, 4096 // block_c)  # short rows: several of them, 32 elements per thread
    quantize_rows_kernel[(triton.cdiv(rows, block_r),)](
        x,
        _bytes(qdata, scale),
        scale,
        x.stride(0),
        x.stride(1),
        rows,
        cols,
        E5M2=format_of(dtype).has_inf,
        POWER_OF_TWO=power_of_two,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        IN_REGISTERS=in_registers,
        num_warps=max(4, block_c // 1024),
    )
    return qdata, scale


def _blocks(
    x: Tensor, dtype: torch.dtype, granularity: str, power_of_two: bool, row: bool, col: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    rows, cols = x.shape
    if row and col and _odd(x):
        by_row = _blocks(x, dtype, granularity, power_of_two, True, False)
        by_col = _blocks(x, dtype, granularity, power_of_two, False, True)
        return (*by_row[:2], *by_col[2:])
    group_c = 32 if granularity == "block_1x32" else BLOCK
    group_r = BLOCK if granularity == "block_128x128" else 1

    def scales(outer: int, inner: int) -> Tensor:
        shape = (triton.cdiv(outer, group_r), triton.cdiv(inner, group_c))
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    by_row, by_col = _outputs(x, dtype, row, col)
    row_scale = scales(rows, cols) if row else None
    col_scale = scales(cols, rows) if col else None
    if x.numel() and (row or col):
        unused = row_scale if row_scale is not None else col_scale
        quantize_blocks_kernel[(triton.cdiv(rows, BLOCK) * triton.cdiv(cols, BLOCK),)](
            x,
            _bytes(by_row, unused),
            unused if row_scale is None else row_scale,
            _bytes(by_col, unused),
            unused if col_scale is None else col_scale,
            x.stride(0),
            x.stride(1),
            rows,
            cols,
            GROUP_R=group_r,
            GROUP_C=group_c,
            E5M2=format_of(dtype).has_inf,
            POWER_OF_TWO=power_of_two or granularity == "block_1x32",
            ROW=row,
            COL=col,
            BLOCK_SIZE=BLOCK,
            num_warps=TILE_WARPS,
        )
    return by_row, row_scale, by_col, col_scale


def _odd(x: Tensor) -> bool:
    return x.shape[0] % 16 != 0 or x.shape[1] % 16 != 0 or x.stride(1) != 1


def _outputs(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool
) -> tuple[Tensor | None, Tensor | None]:
    rows, cols = x.shape
    return (
        x.new_empty((rows, cols), dtype=dtype) if row else None,
        x.new_empty((cols, rows), dtype=dtype) if col else None,
    )


def _bytes(qdata: Tensor | None, unused: Tensor | None) -> Tensor | None:
    """What a kernel takes for a payload: its bytes, or some pointer that it will not touch."""
    return unused if qdata is None else qdata.view(torch.uint8)

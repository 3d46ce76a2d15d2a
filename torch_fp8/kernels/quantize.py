"""Casts to FP8 on CUDA: the twins of `torch_fp8.ops.quantize`'s operators, byte for byte.

Casts are memory-bound. Block casts, and tensorwise casts with a known scale, read the matrix once
and write both layouts from the same tile. If the tensorwise scale comes from the matrix itself, it
is read once more, unless it fits in one tile. The column layout of a rowwise cast reads the matrix
twice on its own, because a tile holds neither whole rows nor whole columns.

Legend: R rows, C columns of x; rowwise: x quantized along C; columnwise: x^T quantized along R.

Launch configurations are fixed, so runs are reproducible and start fast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TILE_WARPS,
    Tile,
    amax_slot,
    cast_flags,
    cdiv,
    is_odd,
    next_power_of_2,
    pad_columns,
    pad_of,
    pointers,
    whole_rows,
    whole_tile,
)
from torch_fp8.kernels.quantize_kernels import (
    TileSums,
    amax_kernel,
    cast_kernel,
    column_amax_kernel,
    quantize_blocks_kernel,
    quantize_rows_kernel,
)
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE, Layouts, is_known

# If C is not a multiple of 16, elements move one at a time, each with an address and a mask in
# registers. Casts then use smaller tiles, 1x128 and 1x32 blocks cast one layout per launch, and
# 128x128 blocks get a zero-padded copy. This is rare, because FP8 GEMMs need multiples of 16. R,
# the number of tokens, is arbitrary, because the column layout is padded.
ODD_TILE = Tile(64, 64, 8)
ODD_SLICE = 32

# The amax pass only loads: 64 x 128 tiles of 16 kB, in two waves of four CTAs on 132 SMs.
AMAX_TILE = Tile(64, BLOCK, 4)
AMAX_PROGRAMS = 1024

# Column amaxes: one partial maximum per slab of rows, with enough slabs to fill the GPU. The cast
# then reduces at most 32 partials per column: 16 kB from L2 besides its own tile of 32 kB.
COLUMN_PROGRAMS = 512
MAX_SLABS = 32


def quantize_2d(
    x: Tensor, options: CastOptions, sums: TileSums | None = None, pads: bool = True
) -> Layouts:
    """Quantize x along C (rowwise) and x^T along R (columnwise).

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides.
        options: cast options; with power_of_two, a given scale must already be a power of two.
        sums: output for partial sums, filled if x is cast in tiles; or None.
        pads: whether to pad the column layout; else it is (C, R).
    Returns:
        See `Layouts`. All are contiguous except scales of block_1x128; see `new_group_scales`.
    """
    granularity, (rows, cols) = options.granularity, x.shape
    if _is_turned(x):  # cast x^T: loads then run along the contiguous dim
        by_col, scale_col, by_row, scale = quantize_2d(x.t(), options.transposed(), sums, False)
        if granularity == "tensorwise":
            scale, scale_col = scale_col, None
        return by_row, scale, pad_columns(by_col, granularity), scale_col
    if granularity == "block_128x128" and (is_odd(x) or (options.columnwise and rows % 16)):
        whole = F.pad(x, (0, -cols % 16, 0, -rows % 16)).contiguous()
        by_row, row_scale, by_col, col_scale = quantize_2d(whole, options)
        return _corner(by_row, rows, cols), row_scale, _corner(by_col, cols, rows), col_scale
    layouts = options.new_layouts(x, pads=pads)
    if not x.numel():
        for empty in layouts[1::2]:
            if empty is not None:
                empty.fill_(1.0)
    elif granularity == "tensorwise":
        _tensorwise(x, options, layouts, sums, pads)
    elif granularity == "rowwise":
        _rows(x, options, layouts)
        _columns(x, options, layouts, sums, pads)
    else:
        _blocks(x, options, layouts, sums, pads)
    return layouts


def quantize_2d_sum(
    x: Tensor, options: CastOptions, sum_dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.quantize.quantize_2d_sum`."""
    sums = TileSums(int(_is_turned(x)))
    return (*quantize_2d(x, options, sums), sums.total(x, sum_dtype))


def _is_turned(x: Tensor) -> bool:
    return x.stride(1) != 1 and x.stride(0) == 1


def _tensorwise(
    x: Tensor, options: CastOptions, layouts: Layouts, sums: TileSums | None, pads: bool
) -> None:
    source, scale, partial, whole = "given", options.scale, None, None
    if scale is not None:
        options = options._replace(power_of_two=False)  # a given scale stays unchanged
    else:
        source, scale = "tensor", layouts[1]
        if options.amax is not None:
            partial = options.amax.view(1).view(torch.int32)
        elif sums is None:
            whole = whole_tile(x, options.columnwise)
        if whole is not None:
            source = "whole"
        elif partial is None:
            partial = partial_amaxes(x)
    pad = pad_of(x.shape[0], "tensorwise", pads)
    _cast_tiles(x, options, layouts, source, scale, partial, pad, sums, whole)


def partial_amaxes(x: Tensor) -> Tensor:
    """Return (P,) int32 partial maxima; the largest is the bits of the amax of x.

    P is a multiple of 16, so one binary of the reader serves all R; some programs may have no tile.
    """
    (num_tiles,), most = AMAX_TILE.grid(x), AMAX_PROGRAMS
    programs = min(cdiv(num_tiles, 16) * 16, most) if is_known(num_tiles) else most
    partial = x.new_empty(programs, dtype=torch.int32)
    amax_kernel[(programs,)](
        x,
        partial,
        *x.stride(),
        *x.shape,
        num_tiles,
        **AMAX_TILE.options,
    )
    return partial


def _columns(
    x: Tensor, options: CastOptions, layouts: Layouts, sums: TileSums | None, pads: bool
) -> None:
    """Cast x^T with a scale per column of x, (C, 1), if wanted."""
    *_, by_col, scale = layouts
    if scale is not None:
        pad, partial = pad_of(x.shape[0], "rowwise", pads), partial_column_amaxes(x, sums)
        options, layouts = options._replace(rowwise=False), (None, None, by_col, None)
        _cast_tiles(x, options, layouts, "columns", scale, partial, pad)


def _most_slabs(cols: int) -> int:
    return min(cdiv(COLUMN_PROGRAMS, cdiv(cols, BLOCK)), MAX_SLABS)


def partial_column_amaxes(x: Tensor, sums: TileSums | None = None) -> Tensor:
    """Return (slabs, C) int32 partial maxima; the largest are the bits of the columns' amaxes.

    The number of slabs does not depend on R; some may have no rows.

    Args:
        x: (R, C), not empty.
        sums: output for partial sums, filled if they are over rows; or None.
    """
    (rows, cols), column_blocks = x.shape, cdiv(x.shape[1], BLOCK)
    slabs = _most_slabs(cols)
    used = min(slabs, cdiv(rows, BLOCK)) if is_known(rows) else slabs
    rows_per_slab = cdiv(cdiv(rows, used), AMAX_TILE.rows) * AMAX_TILE.rows
    partial = torch.empty((slabs, cols), dtype=torch.int32, device=x.device)
    by_slab = sums is not None and sums.axis == 0
    column_amax_kernel[(column_blocks, slabs)](
        x,
        partial,
        *x.stride(),
        *x.shape,
        rows_per_slab,
        sums.allocate(x, slabs) if sums is not None and by_slab else partial,
        SUMS=by_slab,
        **AMAX_TILE._replace(warps=8 if by_slab else 4).options,  # it keeps sums, too
    )
    return partial


def _cast_tiles(
    x: Tensor,
    options: CastOptions,
    layouts: Layouts,
    source: str,
    scale: Tensor,
    partial: Tensor | None,
    pad: int,
    sums: TileSums | None = None,
    whole: Tile | None = None,
) -> None:
    """Cast in tiles, or in the single tile `whole`; fill `scale` unless `source` is "given"."""
    by_row, _, by_col, _ = layouts
    slot = amax_slot(options)
    unused = scale if slot is None else slot  # in a graph the scale may be a view, a call for each
    unused = unused if options.after is None else options.after
    if options.rowwise or options.columnwise or slot is not None:
        num_partials = 1 if partial is None else partial.shape[0]
        # Padding needs another length and mask: too many registers with sums, or an amax in E5M2.
        raises = slot is not None and options.columnwise and format_of(options.dtype).has_inf
        small = is_odd(x) or (pad > 1 and source == "given" and (sums is not None or raises))
        tile = whole or (ODD_TILE if small else Tile(BLOCK, BLOCK, TILE_WARPS))
        cast_kernel[tile.grid(x)](
            x,
            scale,
            *pointers((partial, slot, by_row, by_col), unused),
            *x.stride(),
            *x.shape,
            num_partials,
            *pointers([_partial_sums(x, sums, tile.rows, unused)], unused),
            SUM_AXIS=-1 if sums is None else sums.axis,
            SCALE=source,
            AMAX=slot is not None,
            **cast_flags(options),
            PAD=pad,
            PARTIALS=_most_partials(options, source, x.shape[1]),
            **tile.options,
        )


def _most_partials(options: CastOptions, source: str, cols: int) -> int:
    """Return an upper bound of a cast's number of partials, a power of two that suits all R."""
    if source == "columns":
        return next_power_of_2(_most_slabs(cols))
    return AMAX_PROGRAMS if source == "tensor" and options.amax is None else 1


def _rows(x: Tensor, options: CastOptions, layouts: Layouts) -> None:
    """Cast x with a scale per row, (R, 1), if wanted."""
    (rows, cols), (qdata, scale, *_) = x.shape, layouts
    if qdata is not None:
        tile = whole_rows(cols, 16)
        quantize_rows_kernel[(cdiv(rows, tile.rows),)](
            x,
            qdata.view(torch.uint8),
            *pointers((scale, options.after), scale),
            *x.stride(),
            *x.shape,
            E5M2=format_of(options.dtype).has_inf,
            POWER_OF_TWO=options.power_of_two,
            IN_REGISTERS=tile.cols >= cols,
            **tile.options,
        )


def _partial_sums(x: Tensor, sums: TileSums | None, block: int, unused: Tensor) -> Tensor:
    """Allocate sums of tiles of `block` rows and columns; return `unused` without `sums`."""
    return unused if sums is None else sums.allocate(x, cdiv(x.shape[sums.axis], block))


def _blocks(
    x: Tensor, options: CastOptions, layouts: Layouts, sums: TileSums | None, pads: bool
) -> None:
    granularity, row, col = options.granularity, options.rowwise, options.columnwise
    pad = pad_of(x.shape[0], granularity, pads)
    odd = is_odd(x) or (col and pad == 1 and x.shape[0] % 16 != 0)
    if row and col and odd:
        by_row, by_col = (*layouts[:2], None, None), (None, None, *layouts[2:])
        _blocks(x, options._replace(columnwise=False), by_row, sums, pads)
        _blocks(x, options._replace(rowwise=False), by_col, None, pads)
    elif row or col:
        squares = granularity == "block_128x128"
        if squares or odd:
            sums = None  # squares are for weights; with sums both would spill
        unused = options.after
        if unused is None:
            unused = layouts[1] if row else layouts[3]
        block_r = ODD_SLICE if odd and row else BLOCK
        block_c = ODD_SLICE if odd and col else BLOCK
        tile = Tile(block_r, block_c, ODD_TILE.warps if odd else TILE_WARPS)
        quantize_blocks_kernel[tile.grid(x)](
            x,
            *pointers(layouts, unused),
            *x.stride(),
            *x.shape,
            _partial_sums(x, sums, BLOCK, unused),
            SUM_AXIS=-1 if sums is None else sums.axis,
            SCALE="square" if squares else "groups",
            GROUP=BLOCK_SHAPE[granularity][1],
            **cast_flags(options),
            PAD=pad,
            **tile.options,
        )


def _corner(qdata: Tensor | None, rows: int, cols: int) -> Tensor | None:
    """Return the first rows and columns of a payload."""
    return None if qdata is None else qdata[:rows, :cols].contiguous()

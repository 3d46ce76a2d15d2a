"""The end of every fused producer: a tile of its result in registers is rounded, cast and stored.

Legend: R rows, C columns of the result y; ``row`` is y quantized along C, ``col`` is y^T quantized
along R and padded (see `torch_fp8.kernels.quantize_kernels`); a tile of y is 0 beyond the last row.
All offsets are int64, for tensors of more than 2^31 elements.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fp8_cast import (
    abs_bits,
    cast_bounded,
    cast_saturating,
    largest_bits,
    scale_from_amax,
)
from torch_fp8.kernels.quantize_kernels import load_tile, padded, per_row, store_col


@triton.jit
def rounded(y, OUT: tl.constexpr):
    """Round y to OUT and return float32, as an unfused producer would have written it."""
    return y.to(OUT).to(tl.float32)


@triton.jit
def push_amax(amax_ptr, y):
    """Raise the amax to that of a tile; the order of tiles does not matter for a maximum."""
    tl.atomic_max(amax_ptr, largest_bits(y), sem="relaxed")


@triton.jit
def store_groups(
    y,
    q_ptr,
    scale_ptr,
    r,
    c,
    first_group,
    rows,
    cols,
    mask,
    GROUP_C: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Store y with a scale per GROUP_C columns, block by block for 128, row by row for 32."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    BLOCK_R: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // GROUP_C
    groups = tl.reshape(abs_bits(y), (BLOCK_R, GROUPS, GROUP_C))
    scale = scale_from_amax(tl.max(groups, axis=2), FMAX, POWER_OF_TWO)
    num_groups = tl.cdiv(cols, GROUP_C)
    g = (first_group + tl.arange(0, GROUPS)).to(tl.int64)
    if GROUP_C == 128:
        offsets = g[None, :] * padded(rows, 16) + r[:, None]
    else:
        offsets = r[:, None] * num_groups + g[None, :]
    tl.store(scale_ptr + offsets, scale, mask=(r[:, None] < rows) & (g[None, :] < num_groups))
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK_R, GROUPS, GROUP_C))
    scale = tl.reshape(scale, (BLOCK_R, GROUPS * GROUP_C))
    q = cast_bounded(y, scale, E5M2, POWER_OF_TWO)
    tl.store(q_ptr + r[:, None] * cols + c[None, :], q, mask=mask)


@triton.jit
def store_column_groups(
    y,
    q_ptr,
    scale_ptr,
    r,
    c,
    first_group,
    rows,
    cols,
    GROUP_R: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Store y^T as `store_groups` does, with a scale per GROUP_R rows of y."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    BLOCK_C: tl.constexpr = y.shape[1]
    GROUPS: tl.constexpr = y.shape[0] // GROUP_R
    groups = tl.reshape(abs_bits(y), (GROUPS, GROUP_R, BLOCK_C))
    scale = scale_from_amax(tl.max(groups, axis=1), FMAX, POWER_OF_TWO)
    num_groups = tl.cdiv(rows, GROUP_R)
    g = (first_group + tl.arange(0, GROUPS)).to(tl.int64)
    if GROUP_R == 128:
        offsets = g[:, None] * padded(cols, 16) + c[None, :]
    else:
        offsets = c[None, :] * num_groups + g[:, None]
    tl.store(scale_ptr + offsets, scale, mask=(c[None, :] < cols) & (g[:, None] < num_groups))
    scale = tl.broadcast_to(scale[:, None, :], (GROUPS, GROUP_R, BLOCK_C))
    scale = tl.reshape(scale, (GROUPS * GROUP_R, BLOCK_C))
    PAD: tl.constexpr = 128 if GROUP_R == 128 else 16
    store_col(q_ptr, cast_bounded(y, scale, E5M2, POWER_OF_TWO), r, c, rows, cols, PAD)


@triton.jit
def store_cast(
    y,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    tile_r,
    tile_c,
    r,
    c,
    rows,
    cols,
    mask,
    SCALE: tl.constexpr,  # "given" and "amax" at scale_ptr, "square" tiles, "groups" of GROUP
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    width=None,
):
    """Store the tile (tile_r, tile_c) of y in the layouts asked for, with its scales.

    width: the columns that the tile belongs to, where a row of `cols` has more; None: all.
    """
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    if SCALE == "groups":
        if ROW:
            first = tile_c * (y.shape[1] // GROUP)
            store_groups(y, q_ptr, s_ptr, r, c, first, rows, cols, mask, GROUP, E5M2, POWER_OF_TWO)
        if COL:
            first = tile_r * (y.shape[0] // GROUP)
            store_column_groups(
                y, qt_ptr, st_ptr, r, c, first, rows, cols, GROUP, E5M2, POWER_OF_TWO
            )
    else:
        if SCALE == "given":
            q = cast_saturating(y, per_row(tl.load(scale_ptr), r, rows), E5M2)
        else:
            if SCALE == "amax":
                scale = scale_from_amax(tl.load(scale_ptr), FMAX, POWER_OF_TWO)
                if tile_r + tile_c == 0:
                    tl.store(s_ptr, scale)
            else:
                scale = scale_from_amax(largest_bits(y), FMAX, POWER_OF_TWO)
                # There are fewer than 2^31 tiles of 128 x 128.
                tiles_r, tiles_c = tl.cdiv(rows, y.shape[0]), tl.cdiv(cols, y.shape[1])
                if ROW:
                    tl.store(s_ptr + tile_r * tiles_c + tile_c, scale)
                if COL:
                    tl.store(st_ptr + tile_c * tiles_r + tile_r, scale)
            q = cast_bounded(y, per_row(scale, r, rows), E5M2, POWER_OF_TWO)
        if ROW:
            tl.store(q_ptr + r[:, None] * cols + c[None, :], q, mask=mask)
        if COL:
            PAD: tl.constexpr = 1 if SCALE == "square" else 16
            if width is None:
                store_col(qt_ptr, q, r, c, rows, cols, PAD)
            else:
                store_col(qt_ptr, q, r, c, rows, width, PAD)


@triton.jit
def load_saved(x, r, c, g, rows, cols, mask, SAVED: tl.constexpr):
    """Load a tile as float32, 0 outside, from a plain tensor or from E4M3 with scales (SAVED).

    x: pointers to it and to a scale per 128 columns, strides of both; g: groups of 128 columns.
    """
    x_ptr, scale_ptr, stride_r, stride_c, scale_r, scale_c = x
    if SAVED:
        q = tl.load(x_ptr + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0)
        q = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        inside = (r[:, None] < rows) & (g[None, :] < tl.cdiv(cols, 128))
        scale_ptrs = scale_ptr + r[:, None] * scale_r + g[None, :] * scale_c
        scale = tl.load(scale_ptrs, mask=inside, other=0.0)
        shape: tl.constexpr = (q.shape[0], q.shape[1] // 128, 128)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), (q.shape[0], q.shape[1]))
        return q * scale
    return load_tile(x_ptr, stride_r, stride_c, r, c, mask)

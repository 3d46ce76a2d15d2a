"""Building blocks of kernels that load, round, cast and store a tile of a matrix.

Legend: R rows, C columns of the matrix; ``row`` is the matrix quantized along C; ``col`` is its
transpose quantized along R, padded with zeros to a multiple of PAD columns
(`torch_fp8.quantization.payload_shape`), so that its rows are aligned for wide stores. A tile is 0
beyond the last row. All offsets are int64, because tensors can have more than 2^31 elements.
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

LINE = tl.constexpr(8)
"""Bytes of a row that a thread moves at once, a hint for `tl.max_contiguous` on FP8 pointers.

All accesses to a tile share the layout of the widest one. With 16 bytes of FP8 per thread, a thread
would load 32 bytes of BF16 in two accesses with gaps of 16 bytes between threads, and a warp would
request each 32-byte sector twice. Only casts use the hint: other kernels lack the registers, and 22
of their variants would spill.
"""


@triton.jit
def positions(index, BLOCK_SIZE: tl.constexpr):
    """Return the int64 positions of block `index`, for tensors of more than 2^31 elements."""
    return index.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)


@triton.jit
def tile_at(index, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return tile `index`, counted along rows of tiles: (its row, its column, r, c, mask).

    r (BLOCK_R,), c (BLOCK_C,): rows and columns of its elements; mask: elements within the matrix.
    """
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_r, tile_c = index // tiles_c, index % tiles_c
    r, c = positions(tile_r, BLOCK_R), positions(tile_c, BLOCK_C)
    return tile_r, tile_c, r, c, (r[:, None] < rows) & (c[None, :] < cols)


@triton.jit
def load_tile(x_ptr, stride_r, stride_c, r, c, mask):
    """Load x[r, c] as float32, with 0 outside, which changes no maximum of magnitudes."""
    offsets = r[:, None] * stride_r + c[None, :] * stride_c
    return tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def padded(size, PAD: tl.constexpr):
    """Round `size` up to a multiple of PAD; the compiler sees the divisibility."""
    return tl.cdiv(size, PAD) * PAD


@triton.jit
def store_col(col_ptr, q, r, c, rows, cols, PAD: tl.constexpr):
    """Store a tile of q, which is 0 beyond the last row, in the column layout."""
    length = padded(rows, PAD)
    mask = (r[:, None] < length) & (c[None, :] < cols)
    # q (BLOCK_R, BLOCK_C) goes to col (C, R'), whose rows have `length` elements.
    tl.store(col_ptr + c[None, :] * length + r[:, None], q, mask=mask)


@triton.jit
def store_layouts(
    q,
    row_ptr,
    col_ptr,
    tile,
    rows,
    cols,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    width=None,
    LINES: tl.constexpr = False,
    PLAIN_PADS: tl.constexpr = False,
):
    """Store the same bytes in the requested layouts.

    With both layouts, the kernel reads the stored row layout back to store the column layout;
    otherwise Triton would cast every element twice, once per store. Rows beyond the last one are
    zeros; with PLAIN_PADS, for a scale per column, they keep the cast's result.
    width: number of columns of the tile's part of the matrix, if a row of `cols` has more, or None
    for all. LINES: whether a thread moves a LINE at once.
    """
    _, _, r, c, mask = tile
    if ROW:
        places = row_ptr + r[:, None] * cols + c[None, :]
        if LINES:
            places = tl.max_contiguous(places, (1, LINE))
        tl.store(places, q, mask=mask)
        if COL:
            tl.debug_barrier()
            q = tl.load(places, mask=mask, other=0)
    elif not PLAIN_PADS:
        q = tl.where(mask, q, 0)
    if COL:
        if width is None:
            store_col(col_ptr, q, r, c, rows, cols, PAD)
        else:
            store_col(col_ptr, q, r, c, rows, width, PAD)


@triton.jit
def store_sums(x, sum_ptr, tile, rows, cols, AXIS: tl.constexpr):
    """Store the tile's sums along AXIS: over its rows in sum[tile_r, c] for 0, over its columns in
    sum[tile_c, r] for 1.
    """
    tile_r, tile_c, r, c, _ = tile
    if AXIS == 0:
        tl.store(sum_ptr + tile_r.to(tl.int64) * cols + c, tl.sum(x, axis=0), mask=c < cols)
    if AXIS == 1:
        tl.store(sum_ptr + tile_c.to(tl.int64) * rows + r, tl.sum(x, axis=1), mask=r < rows)


@triton.jit
def store_groups(
    y,
    q_ptr,
    scale_ptr,
    tile,
    rows,
    cols,
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LINES: tl.constexpr = False,
):
    """Cast and store y with a scale per GROUP columns.

    Scales are stored column by column for 128, row by row for 32. LINES: see `store_layouts`.
    """
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    BLOCK_R: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // GROUP
    _, tile_c, r, c, mask = tile
    groups = tl.reshape(abs_bits(y), (BLOCK_R, GROUPS, GROUP))
    scale = scale_from_amax(tl.max(groups, axis=2), FMAX, POWER_OF_TWO)  # (BLOCK_R, GROUPS)
    num_groups = tl.cdiv(cols, GROUP)
    g = (tl.arange(0, GROUPS) + tile_c * GROUPS).to(tl.int64)
    if GROUP == 128:
        offsets = g[None, :] * padded(rows, 16) + r[:, None]  # columns of padded(R, 16) scales
    else:
        offsets = r[:, None] * num_groups + g[None, :]  # rows of ceil(C / GROUP) scales
    tl.store(scale_ptr + offsets, scale, mask=(r[:, None] < rows) & (g[None, :] < num_groups))
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK_R, GROUPS, GROUP))
    scale = tl.reshape(scale, (BLOCK_R, GROUPS * GROUP))
    q = cast_bounded(y, scale, E5M2, POWER_OF_TWO)
    places = q_ptr + r[:, None] * cols + c[None, :]
    if LINES:
        places = tl.max_contiguous(places, (1, LINE))
    tl.store(places, q, mask=mask)


@triton.jit
def store_column_groups(
    y,
    q_ptr,
    scale_ptr,
    tile,
    rows,
    cols,
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PAD: tl.constexpr,
):
    """Cast and store y^T as `store_groups` does, with a scale per GROUP rows of y."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    BLOCK_C: tl.constexpr = y.shape[1]
    GROUPS: tl.constexpr = y.shape[0] // GROUP
    tile_r, _, r, c, _ = tile
    groups = tl.reshape(abs_bits(y), (GROUPS, GROUP, BLOCK_C))
    scale = scale_from_amax(tl.max(groups, axis=1), FMAX, POWER_OF_TWO)  # (GROUPS, BLOCK_C)
    num_groups = tl.cdiv(rows, GROUP)
    g = (tl.arange(0, GROUPS) + tile_r * GROUPS).to(tl.int64)
    if GROUP == 128:
        offsets = g[:, None] * padded(cols, 16) + c[None, :]  # columns of padded(C, 16) scales
    else:
        offsets = c[None, :] * num_groups + g[:, None]  # rows of ceil(R / GROUP) scales
    tl.store(scale_ptr + offsets, scale, mask=(c[None, :] < cols) & (g[:, None] < num_groups))
    scale = tl.broadcast_to(scale[:, None, :], (GROUPS, GROUP, BLOCK_C))
    scale = tl.reshape(scale, (GROUPS * GROUP, BLOCK_C))
    store_col(q_ptr, cast_bounded(y, scale, E5M2, POWER_OF_TWO), r, c, rows, cols, PAD)


@triton.jit
def store_blocks(
    y,
    made,
    tile,
    rows,
    cols,
    SCALE: tl.constexpr,  # "square": one per tile; "groups": one per GROUP elements
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    width=None,
    LINES: tl.constexpr = False,
):
    """Cast and store a tile of y, made of whole blocks, in the requested layouts.

    made: pointers to payload and scales of the row layout, then of the column layout; width, LINES:
    see `store_layouts`. Scales of 1x128 blocks are stored column by column, as torch's scaled
    matmul takes them, other scales row by row.
    """
    q_ptr, s_ptr, qt_ptr, st_ptr = made
    if SCALE == "groups":
        if ROW:
            store_groups(y, q_ptr, s_ptr, tile, rows, cols, GROUP, E5M2, POWER_OF_TWO, LINES)
        if COL:
            store_column_groups(y, qt_ptr, st_ptr, tile, rows, cols, GROUP, E5M2, POWER_OF_TWO, PAD)
    else:
        FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
        scale = scale_from_amax(largest_bits(y), FMAX, POWER_OF_TWO)
        tile_r, tile_c, _, _, _ = tile
        # There are fewer than 2^31 tiles of 128 x 128.
        tiles_r, tiles_c = tl.cdiv(rows, y.shape[0]), tl.cdiv(cols, y.shape[1])
        if ROW:
            tl.store(s_ptr + tile_r * tiles_c + tile_c, scale)
        if COL:
            tl.store(st_ptr + tile_c * tiles_r + tile_r, scale)
        q = cast_bounded(y, scale, E5M2, POWER_OF_TWO)
        store_layouts(q, q_ptr, qt_ptr, tile, rows, cols, ROW, COL, PAD, width, LINES)


@triton.jit
def rounded(y, OUT: tl.constexpr):
    """Round y to OUT, as an unfused producer would have stored it, and return float32."""
    return y.to(OUT).to(tl.float32)


@triton.jit
def push_amax(amax_ptr, y):
    """Raise the amax to include a tile; the order of tiles does not change the result."""
    tl.atomic_max(amax_ptr, largest_bits(y), sem="relaxed")


@triton.jit
def push_column_amaxes(amax_ptr, y, c, cols):
    """Raise the columns' amaxes to include a tile, which must be 0 outside the matrix."""
    tl.atomic_max(amax_ptr + c, tl.max(abs_bits(y), axis=0), mask=c < cols, sem="relaxed")


@triton.jit
def save_tile(y, q_ptr, scale_ptr, tile, rows, cols):
    """Save y for backward: E4M3 with a power-of-two scale per 128 columns."""
    store_groups(y, q_ptr, scale_ptr, tile, rows, cols, 128, False, True)


@triton.jit
def store_cast(
    y,
    scale_ptr,
    made,
    tile,
    rows,
    cols,
    SCALE: tl.constexpr,  # "given", "amax": at scale_ptr; "whole", "plain"; or `store_blocks`'s
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    width=None,
):
    """Cast and store a tile of y and its scales in the requested layouts.

    tile, made, width: see `tile_at` and `store_blocks`. SCALE: if "whole", the tile is the whole
    matrix and gives its amax; if "plain", y is stored without a cast.
    """
    tile_r, tile_c, _, _, _ = tile
    q_ptr, s_ptr, qt_ptr, _ = made
    if SCALE == "square" or SCALE == "groups":
        PAD: tl.constexpr = 1 if SCALE == "square" else 128 if GROUP == 128 else 16
        store_blocks(
            y, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL, PAD, width
        )
    elif SCALE == "plain":
        y = y.to(q_ptr.dtype.element_ty)
        store_layouts(y, q_ptr, qt_ptr, tile, rows, cols, ROW, COL, 1, width)
    else:
        if SCALE == "given":
            scale = tl.load(scale_ptr)
            q = cast_saturating(y, scale, E5M2)
        else:
            FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
            bits = largest_bits(y) if SCALE == "whole" else tl.load(scale_ptr)
            scale = scale_from_amax(bits, FMAX, POWER_OF_TWO)
            if tile_r + tile_c == 0:
                tl.store(s_ptr, scale)
            q = cast_bounded(y, scale, E5M2, POWER_OF_TWO)
        store_layouts(q, q_ptr, qt_ptr, tile, rows, cols, ROW, COL, 16, width)


@triton.jit
def load_saved(x, tile, rows, cols, SAVED: tl.constexpr):
    """Load a tile as float32, 0 outside, from a plain tensor or from E4M3 with scales (SAVED).

    x: pointers to the tensor and to a scale per 128 columns, then the strides of both.
    """
    _, tile_c, r, c, mask = tile
    x_ptr, scale_ptr, stride_r, stride_c, scale_r, scale_c = x
    if SAVED:
        q = tl.load(x_ptr + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0)
        q = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        GROUPS: tl.constexpr = q.shape[1] // 128
        g = tl.arange(0, GROUPS).to(tl.int64) + tile_c * GROUPS
        inside = (r[:, None] < rows) & (g[None, :] < tl.cdiv(cols, 128))
        scale_ptrs = scale_ptr + r[:, None] * scale_r + g[None, :] * scale_c
        scale = tl.load(scale_ptrs, mask=inside, other=0.0)  # (BLOCK_R, GROUPS)
        shape: tl.constexpr = (q.shape[0], GROUPS, 128)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), (q.shape[0], q.shape[1]))
        return q * scale
    return load_tile(x_ptr, stride_r, stride_c, r, c, mask)

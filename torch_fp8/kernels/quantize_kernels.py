"""These kernels are launched by `torch_fp8.kernels.quantize`.

Legend: R rows, C columns of x; ``row`` is x quantized along C, ``col`` is x^T quantized along R and
padded with zeros to a multiple of PAD columns (`torch_fp8.quantization.payload_shape`), so that its
rows begin where many bytes are stored at once. A program works on a tile of x in registers; every
size that is a launch's choice is a parameter.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fp8_cast import abs_bits, cast_bounded, cast_saturating, scale_from_amax
from torch_fp8.kernels.quick_launch import quick


@triton.jit
def positions(index, BLOCK_SIZE: tl.constexpr):
    """Return the int64 positions of block `index`: tensors of more than 2^31 elements need them."""
    return index.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)


@triton.jit
def load_tile(x_ptr, stride_r, stride_c, r, c, mask):
    """Load x[r, c] as float32, and 0, which changes no maximum, outside."""
    offsets = r[:, None] * stride_r + c[None, :] * stride_c
    return tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def padded(size, PAD: tl.constexpr):
    """Round `size` up to multiples of PAD, in a way that tells the compiler of the divisibility."""
    return tl.cdiv(size, PAD) * PAD


@triton.jit
def store_col(col_ptr, q, r, c, rows, cols, PAD: tl.constexpr):
    """Store a tile of q, which is 0 beyond the last row, in the column layout."""
    length = padded(rows, PAD)
    mask = (r[:, None] < length) & (c[None, :] < cols)
    tl.store(col_ptr + c[None, :] * length + r[:, None], q, mask=mask)


@triton.jit
def per_row(scale, r, rows):
    """Broadcast the scalar to a column vector: with the scalar itself the two-layout cast spills.

    Triton 3.6 casts every element twice there, once in the layout of each store, rather than move
    the bytes through shared memory (see the count of cvt in the PTX); free while memory is the
    bound, to be looked at again on a card.
    """
    return tl.where(r < rows, scale, 1.0)[:, None]


@triton.jit
def store_sums(x, sum_ptr, tile_r, tile_c, r, c, rows, cols, AXIS: tl.constexpr):
    """Store the tile's sums along AXIS: sum[tile_r, c] over its rows, or sum[tile_c, r] over
    columns.
    """
    if AXIS == 0:
        tl.store(sum_ptr + tile_r.to(tl.int64) * cols + c, tl.sum(x, axis=0), mask=c < cols)
    if AXIS == 1:
        tl.store(sum_ptr + tile_c.to(tl.int64) * rows + r, tl.sum(x, axis=1), mask=r < rows)


@quick
@triton.jit
def amax_kernel(
    x_ptr,
    partial_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    num_tiles,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write into partial[p] the maximum of abs_bits over the tiles p, p + P, ... of P programs."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        r = positions(tile // tiles_c, BLOCK_R)
        c = positions(tile % tiles_c, BLOCK_C)
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        largest = tl.maximum(largest, abs_bits(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@quick
@triton.jit
def column_amax_kernel(
    x_ptr,
    partial_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    rows_per_slab,
    sum_ptr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write into partial[s, c] the maximum of abs_bits over slab s's rows, into sum[s, c] their
    sum.
    """
    c = positions(tl.program_id(0), BLOCK_C)
    slab = tl.program_id(1)
    first = slab.to(tl.int64) * rows_per_slab
    last = tl.minimum(first + rows_per_slab, rows)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(first, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < last) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        largest = tl.maximum(largest, abs_bits(x))
        if SUMS:
            total += x
    offsets = slab.to(tl.int64) * cols + c
    tl.store(partial_ptr + offsets, tl.max(largest, axis=0), mask=c < cols)
    if SUMS:
        tl.store(sum_ptr + offsets, tl.sum(total, axis=0), mask=c < cols)


@quick
@triton.jit
def cast_kernel(
    x_ptr,
    scale_ptr,
    partial_ptr,
    row_ptr,
    col_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    num_partials,
    sum_ptr,
    SUM_AXIS: tl.constexpr,  # along which the tile's sums are stored, or -1
    SCALE: tl.constexpr,  # "given", "tensor" from partials of amax_kernel, "columns" from slabs
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    PARTIALS: tl.constexpr,  # num_partials rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
):
    """Cast one tile of x in the layouts asked for, with a scale per tensor or per column."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    tile, tiles_c = tl.program_id(0), tl.cdiv(cols, BLOCK_SIZE)
    r = positions(tile // tiles_c, BLOCK_SIZE)
    c = positions(tile % tiles_c, BLOCK_SIZE)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    store_sums(x, sum_ptr, tile // tiles_c, tile % tiles_c, r, c, rows, cols, SUM_AXIS)

    if SCALE == "given":
        scale = tl.load(scale_ptr)
    elif SCALE == "tensor":
        p = tl.arange(0, PARTIALS)
        partials = tl.load(partial_ptr + p, mask=p < num_partials, other=0)
        scale = scale_from_amax(tl.max(partials, axis=0), FMAX, POWER_OF_TWO)
        if tile == 0:
            tl.store(scale_ptr, scale)
    else:
        p = tl.arange(0, PARTIALS)
        partials = tl.load(
            partial_ptr + p[:, None].to(tl.int64) * cols + c[None, :],
            mask=(p[:, None] < num_partials) & (c[None, :] < cols),
            other=0,
        )
        scale = scale_from_amax(tl.max(partials, axis=0), FMAX, POWER_OF_TWO)
        tl.store(scale_ptr + c, scale, mask=(c < cols) & (tile < tiles_c))
        scale = scale[None, :]

    if SCALE != "columns":
        scale = per_row(scale, r, rows)
    if SCALE == "given":
        q = cast_saturating(x, scale, E5M2)
    else:
        q = cast_bounded(x, scale, E5M2, POWER_OF_TWO)
    if ROW:
        tl.store(row_ptr + r[:, None] * cols + c[None, :], q, mask=mask)
    if COL:
        store_col(col_ptr, q, r, c, rows, cols, PAD)


@quick
@triton.jit
def quantize_rows_kernel(
    x_ptr,
    row_ptr,
    scale_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IN_REGISTERS: tl.constexpr,  # BLOCK_C >= cols: x is read once
):
    """Cast BLOCK_R whole rows, with a scale each."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    r = positions(tl.program_id(0), BLOCK_R)
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    if IN_REGISTERS:
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        scale = scale_from_amax(tl.max(abs_bits(x), axis=1), FMAX, POWER_OF_TWO)
        q = cast_bounded(x, scale[:, None], E5M2, POWER_OF_TWO)
        tl.store(row_ptr + r[:, None] * cols + c[None, :], q, mask=mask)
    else:
        largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
        for start in range(0, cols, BLOCK_C):
            mask = (r[:, None] < rows) & (start + c[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, start + c, mask)
            largest = tl.maximum(largest, abs_bits(x))
        scale = scale_from_amax(tl.max(largest, axis=1), FMAX, POWER_OF_TWO)
        for start in range(0, cols, BLOCK_C):
            mask = (r[:, None] < rows) & (start + c[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, start + c, mask)
            q = cast_bounded(x, scale[:, None], E5M2, POWER_OF_TWO)
            tl.store(row_ptr + r[:, None] * cols + start + c[None, :], q, mask=mask)
    tl.store(scale_ptr + r, scale, mask=r < rows)


@triton.jit
def _scale_offsets(r, g, rows, num_groups, GROUP_C: tl.constexpr):
    """Return where the scale of group g of row r lies; see `payload_shape.new_group_scales`."""
    if GROUP_C == 128:
        return g.to(tl.int64) * padded(rows, 16) + r
    return r * num_groups + g


@quick
@triton.jit
def quantize_blocks_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    sum_ptr,
    SUM_AXIS: tl.constexpr,  # along which the tile's sums are stored, or -1
    GROUP_R: tl.constexpr,  # rows and columns that share a scale in the row layout,
    GROUP_C: tl.constexpr,  # and columns and rows in the column layout
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast one tile of x, (BLOCK_R, BLOCK_C), in the layouts asked for, with a scale per block.

    It has whole blocks of these layouts. Scales of 1x128 blocks lie block by block, as torch's
    scaled matmul takes them, others row by row.
    """
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    r, c = positions(tile_r, BLOCK_R), positions(tile_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    store_sums(x, sum_ptr, tile_r, tile_c, r, c, rows, cols, SUM_AXIS)
    bits = abs_bits(x)
    row_offsets = r[:, None] * cols + c[None, :]

    if GROUP_R == BLOCK_R:  # one scale for the tile, in both layouts
        scale = scale_from_amax(tl.max(tl.max(bits, axis=1), axis=0), FMAX, POWER_OF_TWO)
        q = cast_bounded(x, per_row(scale, r, rows), E5M2, POWER_OF_TWO)
        if ROW:
            tl.store(row_ptr + row_offsets, q, mask=mask)
            tl.store(row_scale_ptr + tile_r.to(tl.int64) * tiles_c + tile_c, scale)
        if COL:
            store_col(col_ptr, q, r, c, rows, cols, PAD)
            tiles_r = tl.cdiv(rows, BLOCK_R)
            tl.store(col_scale_ptr + tile_c.to(tl.int64) * tiles_r + tile_r, scale)
    else:
        if ROW:
            GROUPS_C: tl.constexpr = BLOCK_C // GROUP_C  # per tile and row
            groups = tl.reshape(bits, (BLOCK_R, GROUPS_C, GROUP_C))
            scale = scale_from_amax(tl.max(groups, axis=2), FMAX, POWER_OF_TWO)
            num_groups = tl.cdiv(cols, GROUP_C)
            g = tile_c * GROUPS_C + tl.arange(0, GROUPS_C)
            tl.store(
                row_scale_ptr + _scale_offsets(r[:, None], g[None, :], rows, num_groups, GROUP_C),
                scale,
                mask=(r[:, None] < rows) & (g[None, :] < num_groups),
            )
            scale = tl.broadcast_to(scale[:, :, None], (BLOCK_R, GROUPS_C, GROUP_C))
            scale = tl.reshape(scale, (BLOCK_R, BLOCK_C))
            tl.store(row_ptr + row_offsets, cast_bounded(x, scale, E5M2, POWER_OF_TWO), mask=mask)
        if COL:
            GROUPS_R: tl.constexpr = BLOCK_R // GROUP_C
            groups = tl.reshape(bits, (GROUPS_R, GROUP_C, BLOCK_C))
            scale = scale_from_amax(tl.max(groups, axis=1), FMAX, POWER_OF_TWO)
            num_groups = tl.cdiv(rows, GROUP_C)
            g = tile_r * GROUPS_R + tl.arange(0, GROUPS_R)
            tl.store(
                col_scale_ptr + _scale_offsets(c[None, :], g[:, None], cols, num_groups, GROUP_C),
                scale,
                mask=(c[None, :] < cols) & (g[:, None] < num_groups),
            )
            scale = tl.broadcast_to(scale[:, None, :], (GROUPS_R, GROUP_C, BLOCK_C))
            scale = tl.reshape(scale, (BLOCK_R, BLOCK_C))
            q = cast_bounded(x, scale, E5M2, POWER_OF_TWO)
            store_col(col_ptr, q, r, c, rows, cols, PAD)


@quick
@triton.jit
def quantize_odd_squares_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Cast a square of x with one scale; SLICE rows are read at a time, and each is read twice."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    tiles_r, tiles_c = tl.cdiv(rows, BLOCK_SIZE), tl.cdiv(cols, BLOCK_SIZE)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    c = positions(tile_c, BLOCK_SIZE)
    largest = tl.zeros((SLICE, BLOCK_SIZE), dtype=tl.int32)
    for first in range(0, BLOCK_SIZE, SLICE):
        r = tile_r.to(tl.int64) * BLOCK_SIZE + first + tl.arange(0, SLICE)
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        largest = tl.maximum(largest, abs_bits(load_tile(x_ptr, stride_r, stride_c, r, c, mask)))
    scale = scale_from_amax(tl.max(tl.max(largest, axis=1), axis=0), FMAX, POWER_OF_TWO)
    for first in range(0, BLOCK_SIZE, SLICE):
        r = tile_r.to(tl.int64) * BLOCK_SIZE + first + tl.arange(0, SLICE)
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        q = cast_bounded(x, per_row(scale, r, rows), E5M2, POWER_OF_TWO)
        if ROW:
            tl.store(row_ptr + r[:, None] * cols + c[None, :], q, mask=mask)
        if COL:
            tl.store(col_ptr + c[None, :] * rows + r[:, None], q, mask=mask)
    if ROW:
        tl.store(row_scale_ptr + tile_r.to(tl.int64) * tiles_c + tile_c, scale)
    if COL:
        tl.store(col_scale_ptr + tile_c.to(tl.int64) * tiles_r + tile_r, scale)

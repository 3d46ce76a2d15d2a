"""The kernel that `benchmarks.triton_gemm` launches; the legend is there."""

import triton
import triton.language as tl


@triton.jit
def blockwise_gemm_kernel(
    a_desc,
    b_desc,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    rows,
    cols,
    blocks,
    a_scale_stride,  # from a block of columns to the next
    b_scale_stride,
    SQUARE: tl.constexpr,  # whether a scale of B belongs to a BLOCK of its rows, not to one
    BIAS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_S: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of C. Scales of 1x128 are stored block by block, square ones row by row."""
    tl.static_assert(BLOCK % TILE_S == 0, "a tile has one square scale per block")
    tiles_r, tiles_s = tl.cdiv(rows, TILE_R), tl.cdiv(cols, TILE_S)
    # Down a group of tiles, then one to the right: these programs run at a time.
    group = tl.program_id(0) // (GROUP * tiles_s)
    place = tl.program_id(0) % (GROUP * tiles_s)
    height = tl.minimum(tiles_r - group * GROUP, GROUP)
    first_r = (group * GROUP + place % height) * TILE_R
    first_s = place // height * TILE_S
    # Offsets within a tile are int32, from scalar pointers: a thread has many of them.
    r, s = tl.arange(0, TILE_R), tl.arange(0, TILE_S)
    rows_left, cols_left = rows - first_r, cols - first_s
    a_scale_ptr += first_r
    b_scale_ptr += (first_s // BLOCK).to(tl.int64) * blocks if SQUARE else first_s

    total = tl.zeros((TILE_R, TILE_S), dtype=tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        # Zeros outside, in all directions.
        a = a_desc.load([first_r, block * BLOCK])
        b = b_desc.load([first_s, block * BLOCK])
        a_scale = tl.load(a_scale_ptr + r, mask=r < rows_left, other=0.0)
        # Into a new accumulator: the tensor core sums no more than a block.
        product = tl.dot(a, b.T, out_dtype=tl.float32)
        if SQUARE:
            total += product * (a_scale * tl.load(b_scale_ptr))[:, None]
        else:
            b_scale = tl.load(b_scale_ptr + s, mask=s < cols_left, other=0.0)
            total += product * a_scale[:, None] * b_scale[None, :]
        a_scale_ptr += a_scale_stride
        b_scale_ptr += 1 if SQUARE else b_scale_stride
    if BIAS:
        bias = tl.load(bias_ptr + first_s + s, mask=s < cols_left, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptr += first_r.to(tl.int64) * cols + first_s
    inside = (r[:, None] < rows_left) & (s[None, :] < cols_left)
    tl.store(out_ptr + (r * cols)[:, None] + s[None, :], total.to(out_ptr.dtype.element_ty), inside)

"""The optimizer step casts a new weight to its FP8 payload: E4M3 codes, power-of-two scales.

The step has each new weight in registers, but a scale is shared by 128 x 128 weights or by all of
them, and their amax is known only after the last one. Power-of-two scales, though, rarely change in
a step. The step therefore casts with the payload's current scale, and casts again if the new scale
differs: a square in the same program, a whole weight in `recast_kernel`, whose programs otherwise
exit at once. The result always equals a cast of the new weights.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.block_layout import at_origin, places, square
from torch_fp8.kernels.fp8_cast import cast_bounded, scale_from_amax


@triton.jit
def payload_at_origin(payload_ptr, payload_t_ptr, first, rows, cols, TRANSPOSED: tl.constexpr):
    """Move pointers to codes (R, C) and (C, R) to the square that starts with group `first`."""
    payload_ptr = at_origin(payload_ptr, first, cols, "squares")
    if TRANSPOSED:
        square_row, square_col = square(first, tl.cdiv(cols, 32))
        rows = rows // 16 * 16  # the compiler learns the divisibility
        payload_t_ptr += square_col.to(tl.int64) * 128 * rows + square_row * 128
        payload_t_ptr = tl.multiple_of(payload_t_ptr, 16)
    return payload_ptr, payload_t_ptr


@triton.jit
def store_payload(
    weight, scale, payload_ptr, payload_t_ptr, local, tile, rows, cols, TRANSPOSED: tl.constexpr
):
    """Cast a tile (G, 32) of groups `local` and store it in one or both layouts.

    tile: positions, mask, rows and columns of the tile, as returned by `places`.
    """
    position, mask, row, col = tile
    codes = cast_bounded(weight, scale, False, True)
    tl.store(payload_ptr + position, codes, mask=mask)
    if TRANSPOSED:
        rows = rows // 16 * 16
        # The compiler can see that this mask is constant within 16 rows.
        mask = (row < rows)[:, None] & (col < cols)
        col = (local // 128 * 32)[:, None] + tl.arange(0, 32)[None, :]
        tl.store(payload_t_ptr + col * rows + (local % 128)[:, None], codes, mask=mask)


@triton.jit
def scale_of_square(largest):
    """Compute the scale of a square from a tile of the bits of its partial amaxes."""
    return scale_from_amax(tl.max(tl.max(largest, axis=1), axis=0), 448.0, True)


@triton.jit
def cast_square(
    weight_ptr,
    scale,
    payload_ptr,
    payload_t_ptr,
    first,
    rows,
    cols,
    TRANSPOSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load a square's weights from memory and cast them; pointers are at its origin."""
    for done in range(0, 512, GROUPS):
        local = done + tl.arange(0, GROUPS)
        tile = places(first, local, 0, cols, "squares", rows=rows)
        weight = tl.load(weight_ptr + tile[0], mask=tile[1], other=0.0).to(tl.float32)
        store_payload(
            weight, scale, payload_ptr, payload_t_ptr, local, tile, rows, cols, TRANSPOSED
        )

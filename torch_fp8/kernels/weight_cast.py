"""The optimizer step casts a new weight to its FP8 payload: E4M3 codes, power-of-two scales.

The step has each new weight in registers, but its scale belongs to 128 x 128 of them, or to all,
and the largest is known when the last one is. Scales that are powers of two hardly ever change in a
step, though. So weights are cast with the scale of the payload that is there, and where the new one
turns out to be another they are cast again: squares by the program that has them, a whole weight by
`recast_kernel`, whose programs otherwise leave at once. The result is that of a cast of the new
weights, always.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.block_layout import at_origin, places, square
from torch_fp8.kernels.fp8_cast import cast_bounded, scale_from_amax


@triton.jit
def payload_at_origin(payload_ptr, payload_t_ptr, first, rows, cols, TRANSPOSED: tl.constexpr):
    """Move pointers to a payload, codes (R, C) and (C, R), to the square with group `first`."""
    payload_ptr = at_origin(payload_ptr, first, cols, "squares")
    if TRANSPOSED:
        square_row, square_col = square(first, tl.cdiv(cols, 32))
        rows = rows // 16 * 16  # tells the compiler what it is
        payload_t_ptr += square_col.to(tl.int64) * 128 * rows + square_row * 128
        payload_t_ptr = tl.multiple_of(payload_t_ptr, 16)
    return payload_ptr, payload_t_ptr


@triton.jit
def store_payload(
    weight, scale, payload_ptr, payload_t_ptr, local, tile, rows, cols, TRANSPOSED: tl.constexpr
):
    """Cast a tile (G, 32) of groups `local` and store it in one or both layouts.

    tile: what `places` returns of it.
    """
    position, mask, row, col = tile
    codes = cast_bounded(weight, scale, False, True)
    tl.store(payload_ptr + position, codes, mask=mask)
    if TRANSPOSED:
        rows = rows // 16 * 16
        # Of this mask the compiler knows that it does not change within 16 rows.
        mask = (row < rows)[:, None] & (col < cols)
        col = (local // 128 * 32)[:, None] + tl.arange(0, 32)[None, :]
        tl.store(payload_t_ptr + col * rows + (local % 128)[:, None], codes, mask=mask)


@triton.jit
def scale_of_square(largest):
    """Compute the scale of a square from a tile of the bits of its largest magnitudes."""
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
    """Cast the weights of a square, which are in memory; pointers are at its origin."""
    for done in range(0, 512, GROUPS):
        local = done + tl.arange(0, GROUPS)
        tile = places(first, local, 0, cols, "squares", rows=rows)
        weight = tl.load(weight_ptr + tile[0], mask=tile[1], other=0.0).to(tl.float32)
        store_payload(
            weight, scale, payload_ptr, payload_t_ptr, local, tile, rows, cols, TRANSPOSED
        )

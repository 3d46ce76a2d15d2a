"""These kernels of scales per channel are launched by `torch_fp8.kernels.smooth`.

Legend: R rows, C columns. Bit patterns of magnitudes are ordered as the numbers are, NaN above all.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.epilogue import store_cast, store_groups
from torch_fp8.kernels.fp8_cast import abs_bits
from torch_fp8.kernels.quantize_kernels import load_tile, positions
from torch_fp8.kernels.quick_launch import quick


@triton.jit
def _raise_columns(amax_ptr, y, c, cols):
    """Raise the amaxes of columns to those of a tile, which is 0 outside of the tensor."""
    tl.atomic_max(amax_ptr + c, tl.max(abs_bits(y), axis=0), mask=c < cols, sem="relaxed")


@quick
@triton.jit
def column_amax_kernel(
    x_ptr,
    amax_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Raise the amaxes of BLOCK_C columns to those of TILES tiles."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    first, c = tl.program_id(0) // tiles_c, positions(tl.program_id(0) % tiles_c, BLOCK_C)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for tile in range(0, TILES):
        r = positions(first * TILES + tile, BLOCK_R)
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        largest = tl.maximum(largest, abs_bits(load_tile(x_ptr, stride_r, stride_c, r, c, mask)))
    _raise_columns(amax_ptr, largest.to(tl.float32, bitcast=True), c, cols)


@quick
@triton.jit
def swiglu_columns_kernel(
    gate_ptr,
    up_ptr,
    amax_ptr,
    gate_q_ptr,
    gate_s_ptr,
    up_q_ptr,
    up_s_ptr,
    gate_r,
    gate_c,
    up_r,
    up_c,
    rows,
    cols,
    OUT: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Raise the amaxes of columns to those of a tile of silu(gate) * up; save gate and up."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_c = tl.program_id(0) % tiles_c
    r, c = positions(tl.program_id(0) // tiles_c, BLOCK_R), positions(tile_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    gate = load_tile(gate_ptr, gate_r, gate_c, r, c, mask)
    up = load_tile(up_ptr, up_r, up_c, r, c, mask)
    h = (gate * tl.sigmoid(gate) * up).to(OUT)
    if SAVE:
        first = tile_c * (BLOCK_C // 128)
        store_groups(gate, gate_q_ptr, gate_s_ptr, r, c, first, rows, cols, mask, 128, False, True)
        store_groups(up, up_q_ptr, up_s_ptr, r, c, first, rows, cols, mask, 128, False, True)
    _raise_columns(amax_ptr, h.to(tl.float32), c, cols)


@triton.jit
def _exponents(amax_ptr, i, cols):
    """Return the exponents of amaxes (-127 of zero and beyond the end) and their bits."""
    MANTISSA: tl.constexpr = 23
    BIAS: tl.constexpr = 127
    bits = tl.load(amax_ptr + i, mask=i < cols, other=0)
    return (bits >> MANTISSA) - BIAS, bits


@quick
@triton.jit
def smooth_factors_kernel(
    amax_ptr,
    s_ptr,
    inverse_ptr,
    smoothed_ptr,
    cols,
    RANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute all factors in one program, which reads the amaxes twice."""
    MANTISSA: tl.constexpr = 23
    BIAS: tl.constexpr = 127
    # Scalars of type int32 from the start: a loop does not change types.
    largest = tl.max(tl.zeros((BLOCK,), tl.int32), axis=0) - BIAS
    for start in range(0, cols, BLOCK):
        exponent, _ = _exponents(amax_ptr, start + tl.arange(0, BLOCK), cols)
        largest = tl.maximum(largest, tl.max(tl.where(exponent <= BIAS, exponent, -BIAS), axis=0))
    smoothed = tl.max(tl.zeros((BLOCK,), tl.int32), axis=0)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        exponent, bits = _exponents(amax_ptr, i, cols)
        half = tl.where(exponent <= BIAS, tl.maximum(exponent, largest - RANGE) >> 1, 0)
        s = ((BIAS - half) << MANTISSA).to(tl.float32, bitcast=True)
        tl.store(s_ptr + i, s, mask=i < cols)
        inverse = ((BIAS + half) << MANTISSA).to(tl.float32, bitcast=True)
        tl.store(inverse_ptr + i, inverse, mask=i < cols)
        product = bits.to(tl.float32, bitcast=True) * s
        smoothed = tl.maximum(smoothed, tl.max(abs_bits(product), axis=0))
    tl.store(smoothed_ptr, smoothed)


@quick
@triton.jit
def quantize_columns_kernel(
    x_ptr,
    factors_ptr,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    SCALE: tl.constexpr,  # see `store_cast`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast one tile of x whose columns are multiplied by factors."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    r, c = positions(tile_r, BLOCK_R), positions(tile_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    y = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    y *= tl.load(factors_ptr + c, mask=c < cols, other=0.0)[None, :]
    store_cast(
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
        SCALE,
        GROUP,
        E5M2,
        POWER_OF_TWO,
        ROW,
        COL,
    )

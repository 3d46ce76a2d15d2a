"""Per-channel scales on CUDA: the twin of `torch_fp8.ops.smooth`, up to the last bits of exp.

Memory traffic in bytes per BF16 element: `column_amax` reads 2; `swiglu_save_columns` reads 4 of
gate and up, and writes 2 if it saves them; `quantize_columns` reads 2 and writes 1 per layout.
`smooth_factors` is a single program.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import amax_slot, fused_flags, pointers, scale_source
from torch_fp8.kernels.fp8_cast import abs_bits
from torch_fp8.kernels.quantize import partial_column_amaxes, quantize_2d
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.swiglu import is_fused, swiglu_save, tile_of
from torch_fp8.kernels.tiles import load_tile, push_amax, store_cast, tile_at
from torch_fp8.quantization.scaling import SMOOTH_RANGE


@triton.jit
def _exponents(amax_ptr, i, cols):
    """Return the amaxes' exponents (-127 for zero and beyond the end) and their bits."""
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
    """Compute all factors in a single program, which reads the amaxes twice."""
    MANTISSA: tl.constexpr = 23
    BIAS: tl.constexpr = 127
    # A Triton loop cannot change a variable's type, so these start as int32 scalars.
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
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def quantize_columns_kernel(
    x_ptr,
    factors_ptr,
    scale_ptr,
    amax_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    AMAX: tl.constexpr,
    SCALE: tl.constexpr,  # see `store_cast`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Multiply the columns of one tile of x by their factors and cast it."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    made = (q_ptr, s_ptr, qt_ptr, st_ptr)
    y = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    y *= tl.load(factors_ptr + c, mask=c < cols, other=0.0)[None, :]
    if AMAX:
        push_amax(amax_ptr, y)
    store_cast(y, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL)


FACTORS = 1024
"""Channels that `smooth_factors_kernel` processes at a time."""


def column_amax(x: Tensor) -> Tensor:
    """See `torch_fp8.ops.smooth.column_amax`."""
    if not x.numel():
        return x.new_zeros(x.shape[1], dtype=torch.float32)
    return partial_column_amaxes(x).amax(0).view(torch.float32)


def swiglu_save_columns(gate: Tensor, up: Tensor, save: bool) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.smooth.swiglu_save_columns`."""
    return swiglu_save(gate, up, None, save, by_column=True)


def smooth_factors(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `torch_fp8.ops.smooth.smooth_factors`."""
    s, inverse = torch.empty_like(amax), torch.empty_like(amax)
    smoothed = amax.new_zeros((), dtype=torch.int32)
    if amax.numel():
        smooth_factors_kernel[(1,)](
            amax.contiguous().view(torch.int32),
            s,
            inverse,
            smoothed,
            amax.numel(),
            RANGE=SMOOTH_RANGE,
            BLOCK=FACTORS,
            num_warps=4,
        )
    return s, inverse, smoothed.view(torch.float32)


def quantize_columns(x: Tensor, factors: Tensor, options: CastOptions) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.smooth.quantize_columns`."""
    if not is_fused(options, x):
        return quantize_2d((x.float() * factors).contiguous(), options)
    layouts = options.new_layouts(x)
    tile = tile_of(options)
    quantize_columns_kernel[tile.grid(x)](
        x,
        factors,
        scale_source(options, x),
        *pointers((amax_slot(options), *layouts), x),
        *x.stride(),
        *x.shape,
        AMAX=options.raises_amax,
        **fused_flags(options, layouts),
        **tile.options,
    )
    return layouts

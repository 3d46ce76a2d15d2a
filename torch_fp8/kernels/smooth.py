"""Scales per channel on CUDA: the twin of `torch_fp8.ops.smooth`, up to the last bits of exp.

What each reads and writes, per element of BF16, is: `column_amax` 2; `swiglu_save_columns` 4 of
gate and up and, saving, 2; `quantize_columns` 2 and 1 for each layout. `smooth_factors` is one
program.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.fused_launch import TYPES, Cast, amax_bits, cast_unfused, saved_outputs
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import BLOCK, pointers
from torch_fp8.kernels.smooth_kernels import (
    column_amax_kernel,
    quantize_columns_kernel,
    smooth_factors_kernel,
    swiglu_columns_kernel,
)
from torch_fp8.kernels.swiglu import is_fused, tile

# Rows of a tile, and tiles that a program reads: 256 rows for each atomic maximum of a column.
ROWS, WARPS, TILES = 32, 8, 8
FACTORS = 1024
"""The channels that the program of the factors takes at a time."""
RANGE = 32
"""See `torch_fp8.ops.smooth.RANGE`."""


def column_amax(x: Tensor) -> Tensor:
    """See `torch_fp8.ops.smooth.column_amax`."""
    rows, cols = x.shape
    largest = amax_bits(x, cols)
    if x.numel():
        with torch.cuda.device_of(x):
            column_amax_kernel[(cdiv(rows, ROWS * TILES) * cdiv(cols, BLOCK),)](
                x,
                largest,
                *x.stride(),
                rows,
                cols,
                TILES=TILES,
                BLOCK_R=ROWS,
                BLOCK_C=BLOCK,
                num_warps=WARPS,
            )
    return largest.view(torch.float32)


def swiglu_save_columns(gate: Tensor, up: Tensor, save: bool) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.smooth.swiglu_save_columns`."""
    rows, cols = gate.shape
    largest = amax_bits(gate, cols)
    saved = (*saved_outputs(gate, save), *saved_outputs(up, save))
    if gate.numel():
        with torch.cuda.device_of(gate):
            swiglu_columns_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
                gate,
                up,
                largest,
                *pointers(saved, gate),
                *gate.stride(),
                *up.stride(),
                rows,
                cols,
                OUT=TYPES[gate.dtype],
                SAVE=save,
                BLOCK_R=ROWS,
                BLOCK_C=BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
    return (*saved, largest.view(torch.float32))


def smooth_factors(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `torch_fp8.ops.smooth.smooth_factors`."""
    s, inverse = torch.empty_like(amax), torch.empty_like(amax)
    smoothed = amax.new_zeros((), dtype=torch.int32)
    if amax.numel():
        with torch.cuda.device_of(amax):
            smooth_factors_kernel[(1,)](
                amax.contiguous().view(torch.int32),
                s,
                inverse,
                smoothed,
                amax.numel(),
                RANGE=RANGE,
                BLOCK=FACTORS,
                num_warps=4,
            )
    return s, inverse, smoothed.view(torch.float32)


def quantize_columns(x: Tensor, factors: Tensor, options: CastOptions) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.smooth.quantize_columns`."""
    cast = Cast.of(options)
    if not is_fused(cast, x):
        return cast_unfused((x.float() * factors).contiguous(), options, None)
    rows, cols = x.shape
    made = options.new_layouts(x)
    block_r, warps, _ = tile(cast, rows)
    with torch.cuda.device_of(x):
        quantize_columns_kernel[(cdiv(rows, block_r) * cdiv(cols, BLOCK),)](
            x,
            factors,
            cast.source(x),
            *pointers(made, x),
            *x.stride(),
            rows,
            cols,
            **cast.flags(),
            BLOCK_R=block_r,
            BLOCK_C=BLOCK,
            num_warps=warps,
        )
    return made

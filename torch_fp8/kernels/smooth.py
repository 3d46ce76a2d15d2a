"""Per-channel scales on CUDA: the twin of `torch_fp8.ops.smooth`, up to the last bits of exp.

Memory traffic in bytes per BF16 element: `column_amax` reads 2; `swiglu_save_columns` reads 4 of
gate and up, and writes 2 if it saves them; `quantize_columns` reads 2 and writes 1 per layout.
`smooth_factors` is a single program.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import BLOCK, amax_slot, fused_flags, pointers, scale_source
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import partial_column_amaxes, quantize_2d
from torch_fp8.kernels.smooth_kernels import quantize_columns_kernel, smooth_factors_kernel
from torch_fp8.kernels.swiglu import is_fused, swiglu_save, tile
from torch_fp8.quantization.scaling import SMOOTH_RANGE

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
            enable_fp_fusion=True,
        )
    return s, inverse, smoothed.view(torch.float32)


def quantize_columns(x: Tensor, factors: Tensor, options: CastOptions) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.smooth.quantize_columns`."""
    if not is_fused(options, x):
        return quantize_2d((x.float() * factors).contiguous(), options)
    rows, cols = x.shape
    layouts = options.new_layouts(x)
    block_r, warps = tile(options)
    quantize_columns_kernel[(cdiv(rows, block_r) * cdiv(cols, BLOCK),)](
        x,
        factors,
        scale_source(options, x),
        *pointers((amax_slot(options), *layouts), x),
        *x.stride(),
        rows,
        cols,
        AMAX=options.raises_amax,
        **fused_flags(options, layouts),
        BLOCK_R=block_r,
        BLOCK_C=BLOCK,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    return layouts

"""Rows of experts on CUDA: the twins of `torch_fp8.ops.moe_rows`, bit for bit.

All of them are memory-bound. The transpose reads rows twice. Its first pass raises the amax of each
expert and column by atomic maxima over 16 rows at a time, in any order. Programs therefore work on
equal tiles, whether one expert has most of the tokens or many experts have few.

Legend: T tokens, k experts of a token, R rows, E experts, K columns. Launch configurations are
fixed.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.cast_launch import amax_bits
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.moe_rows_kernels import (
    combine_rows_kernel,
    gather_rows_kernel,
    group_amax_kernel,
    group_scale_kernel,
    transpose_groups_kernel,
)
from torch_fp8.quantization.payload_shape import is_known

GATHER_ROWS, GATHER_COLS = 16, 512
"""Rows and columns of a gathered tile: 512 accesses of 16 bytes, four per thread of four warps."""
TILE, TILE_WARPS = 128, 16
"""Rows and columns of a transposed tile: 128 contiguous bytes in both directions."""
ODD_TILE, ODD_WARPS = 64, 8
"""Tile and warps if K is not a multiple of 16, so that bytes move one by one."""
ODD_GATHER_COLS = 128
COMBINE_TOKENS, COMBINE_COLS = 4, 256
SCALES = 1024
WARPS = 4
GROUP_ALIGNMENT = 16


def gather_payload(qdata: Tensor, scale: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.moe_rows.gather_payload`."""
    (tokens, cols), rows = qdata.shape, token.shape[0]
    codes = qdata.new_empty((rows, cols))
    scales = scale.new_empty((rows, 1))
    block = GATHER_COLS if cols % 16 == 0 else ODD_GATHER_COLS
    if rows:
        gather_rows_kernel[(cdiv(rows, GATHER_ROWS), max(cdiv(cols, block), 1))](
            qdata.contiguous().view(torch.uint8),
            scale.contiguous(),
            token,
            codes.view(torch.uint8),
            scales,
            tokens,
            rows,
            cols,
            BLOCK_R=GATHER_ROWS,
            BLOCK_C=block,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return codes, scales


def transpose_payload(
    qdata: Tensor, scale: Tensor, offs: Tensor, token: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.moe_rows.transpose_payload`; groups end at multiples of 16 rows."""
    (tokens, cols), groups = qdata.shape, offs.shape[0]
    rows = tokens if token is None else token.shape[0]
    out = qdata.new_empty((cols, rows))  # x^T: contiguous along rows
    scales = scale.new_empty((groups, cols))
    if not cols:
        return out, scales
    bits = amax_bits(qdata, groups, cols)
    operands = qdata.contiguous().view(torch.uint8), scale.contiguous(), offs
    operands = (*operands, offs if token is None else token)
    tile, warps = (TILE, TILE_WARPS) if cols % 16 == 0 else (ODD_TILE, ODD_WARPS)
    grid = (cdiv(rows, tile) * cdiv(cols, tile),)
    flags = {"GATHER": token is not None, "BLOCK_R": tile, "BLOCK_C": tile}
    flags |= {"num_warps": warps, "enable_fp_fusion": True}
    if rows:
        group_amax_kernel[grid](*operands, bits, tokens, rows, cols, groups, **flags)
    if groups:
        group_scale_kernel[(cdiv(groups * cols, SCALES),)](
            bits, scales, groups * cols, BLOCK=SCALES, num_warps=WARPS, enable_fp_fusion=True
        )
    if rows:
        transpose_groups_kernel[grid](
            *operands,
            scales,
            out.view(torch.uint8),
            tokens,
            rows,
            cols,
            groups,
            **flags,
            PAD=GROUP_ALIGNMENT if is_known(rows) and rows % GROUP_ALIGNMENT == 0 else 1,
        )
    return out, scales


def combine_rows(rows: Tensor, row: Tensor) -> Tensor:
    """See `torch_fp8.ops.moe_rows.combine_rows`."""
    (tokens, top_k), cols = row.shape, rows.shape[1]
    out = rows.new_empty((tokens, cols))
    if out.numel():
        combine_rows_kernel[(cdiv(tokens, COMBINE_TOKENS), cdiv(cols, COMBINE_COLS))](
            rows.contiguous(),
            row.contiguous(),
            out,
            tokens,
            cols,
            TOP_K=top_k,
            BLOCK_T=COMBINE_TOKENS,
            BLOCK_C=COMBINE_COLS,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return out

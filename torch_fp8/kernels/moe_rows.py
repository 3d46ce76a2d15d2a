"""Rows of experts on CUDA: the twins of `torch_fp8.ops.moe_rows`, bit for bit.

All of them are memory-bound. The transpose reads rows twice. Its first pass raises the amax of each
expert and column by atomic maxima over 16 rows at a time, in any order. Programs therefore work on
equal tiles, whether one expert has most of the tokens or many experts have few.

Legend: T tokens, k experts of a token, R rows, E experts, K columns. Launch configurations are
fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.cast_launch import BLOCK, TILE_WARPS, Tile, amax_bits, cdiv
from torch_fp8.kernels.fp8_cast import abs_bits, cast_bounded, scale_from_amax
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import positions, store_col, tile_at
from torch_fp8.quantization.payload_shape import is_known

SAME = tl.constexpr(16)
"""Number of rows that always belong to the same group."""


@triton.jit
def group_of(offs_ptr, r, groups):
    """Return each row's group, or `groups` behind the last one, by a binary search.

    offs_ptr: ends of at most 1,023 groups, ascending.
    """
    before = tl.zeros_like(r).to(tl.int32)
    for i in tl.static_range(10):  # 2^10 > 1,023, the most groups of a grouped GEMM
        further = before + (512 >> i)
        end = tl.load(offs_ptr + further - 1, mask=further <= groups, other=0x7FFFFFFF)
        before = tl.where(end <= r, further, before)
    return before


@triton.jit
def _load_values(operands, tokens, tile, rows, cols, GATHER: tl.constexpr):
    """Load a tile of rows as float32, with zeros outside and for padding rows.

    operands: pointers to codes (T, K), their scales (T,), and each row's token (R,).
    """
    x_ptr, scale_ptr, token_ptr = operands
    _, _, r, c, mask = tile
    exists = r < rows
    if GATHER:
        r = tl.load(token_ptr + r, mask=exists, other=0)
        exists &= r < tokens
        mask &= exists[:, None]
    q = tl.load(x_ptr + r[:, None] * cols + c[None, :], mask=mask, other=0)
    scale = tl.load(scale_ptr + r, mask=exists, other=1.0)
    return q.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]


@triton.jit
def _groups_of(offs_ptr, tile_r, groups, BLOCK_R: tl.constexpr):
    """Return the groups (BLOCK_R / 16,) of a tile's rows, one for each 16 rows."""
    first = (tile_r * BLOCK_R + tl.arange(0, BLOCK_R // SAME) * SAME).to(tl.int32)
    return group_of(offs_ptr, first, groups).to(tl.int64)


@quick
@triton.jit(do_not_specialize=["tokens", "rows", "groups"])
def group_amax_kernel(
    x_ptr,
    scale_ptr,
    offs_ptr,
    token_ptr,
    amax_ptr,
    tokens,
    rows,
    cols,
    groups,
    GATHER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Raise the amaxes (E, K) of groups and columns to include one tile of rows."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    tile_r, _, _, c, _ = tile
    x = _load_values((x_ptr, scale_ptr, token_ptr), tokens, tile, rows, cols, GATHER)
    parts = tl.reshape(abs_bits(x), (BLOCK_R // SAME, SAME, BLOCK_C))
    group = _groups_of(offs_ptr, tile_r, groups, BLOCK_R)  # (BLOCK_R / 16,)
    mask = (group[:, None] < groups) & (c[None, :] < cols)
    places = amax_ptr + group[:, None] * cols + c[None, :]  # (BLOCK_R / 16, BLOCK_C)
    tl.atomic_max(places, tl.max(parts, axis=1), mask=mask, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["size"])
def group_scale_kernel(amax_ptr, scale_ptr, size, BLOCK: tl.constexpr):
    """Compute power-of-two scales from the bits of amaxes."""
    i = positions(tl.program_id(0), BLOCK)
    bits = tl.load(amax_ptr + i, mask=i < size, other=0)
    tl.store(scale_ptr + i, scale_from_amax(bits, 448.0, True), mask=i < size)


@quick
@triton.jit(do_not_specialize=["tokens", "rows", "groups"])
def transpose_groups_kernel(
    x_ptr,
    scale_ptr,
    offs_ptr,
    token_ptr,
    new_scale_ptr,
    out_ptr,
    tokens,
    rows,
    cols,
    groups,
    GATHER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAD: tl.constexpr,  # 16 if R is a multiple of 16, else 1
):
    """Store the transpose (K, R) of one tile of rows, cast with the scales of its groups."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    tile_r, _, r, c, _ = tile
    x = _load_values((x_ptr, scale_ptr, token_ptr), tokens, tile, rows, cols, GATHER)
    group = _groups_of(offs_ptr, tile_r, groups, BLOCK_R)
    mask = (group[:, None] < groups) & (c[None, :] < cols)
    scale = tl.load(new_scale_ptr + group[:, None] * cols + c[None, :], mask=mask, other=0.0)
    shape: tl.constexpr = (BLOCK_R // SAME, SAME, BLOCK_C)
    scale = tl.reshape(tl.broadcast_to(scale[:, None, :], shape), (BLOCK_R, BLOCK_C))
    behind = scale == 0.0  # rows behind the last group: real scales are not zero
    q = cast_bounded(tl.where(behind, 0.0, x), tl.where(behind, 1.0, scale), False, True)
    store_col(out_ptr, q, r, c, rows, cols, PAD)  # q (BLOCK_R, BLOCK_C) to out (K, R)


@quick
@triton.jit(do_not_specialize=["tokens", "rows"])
def gather_rows_kernel(
    x_ptr,
    scale_ptr,
    token_ptr,
    out_ptr,
    out_scale_ptr,
    tokens,
    rows,
    cols,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Copy the codes and scales of BLOCK_R rows' tokens; padding gets zeros and scale 1."""
    r, c = positions(tl.program_id(0), BLOCK_R), positions(tl.program_id(1), BLOCK_C)
    exists = r < rows
    token = tl.load(token_ptr + r, mask=exists, other=tokens)
    inside = c[None, :] < cols
    mask = (token[:, None] < tokens) & inside
    q = tl.load(x_ptr + token[:, None] * cols + c[None, :], mask=mask, other=0)
    tl.store(out_ptr + r[:, None] * cols + c[None, :], q, mask=exists[:, None] & inside)
    if tl.program_id(1) == 0:
        scale = tl.load(scale_ptr + token, mask=token < tokens, other=1.0)
        tl.store(out_scale_ptr + r, scale, mask=exists)


@quick
@triton.jit(do_not_specialize=["tokens"])
def combine_rows_kernel(
    x_ptr,
    row_ptr,
    out_ptr,
    tokens,
    cols,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add up TOP_K rows for each of BLOCK_T tokens, in order, and round once."""
    t, c = positions(tl.program_id(0), BLOCK_T), positions(tl.program_id(1), BLOCK_C)
    exists = t < tokens
    mask = exists[:, None] & (c[None, :] < cols)
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        row = tl.load(row_ptr + t * TOP_K + i, mask=exists, other=0)
        x = tl.load(x_ptr + row[:, None] * cols + c[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        total = x if i == 0 else total + x
    tl.store(out_ptr + t[:, None] * cols + c[None, :], total, mask=mask)


GATHERED, ODD_GATHERED = Tile(16, 512, 4), Tile(16, 128, 4)
"""Gathered tile: 512 accesses of 16 bytes, four per thread; and that if K is not a multiple of 16,
so that bytes move one by one.
"""
TRANSPOSED, ODD_TRANSPOSED = Tile(BLOCK, BLOCK, TILE_WARPS), Tile(64, 64, 8)
"""Transposed tile: 128 contiguous bytes in both directions; and that for other K."""
COMBINE_TOKENS, COMBINE_COLS = 4, 256
SCALES = 1024
WARPS = 4
GROUP_ALIGNMENT = 16


def gather_payload(qdata: Tensor, scale: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.moe_rows.gather_payload`."""
    (tokens, cols), rows = qdata.shape, token.shape[0]
    codes = qdata.new_empty((rows, cols))
    scales = scale.new_empty((rows, 1))
    tile = GATHERED if cols % 16 == 0 else ODD_GATHERED
    if rows:
        gather_rows_kernel[(cdiv(rows, tile.rows), max(cdiv(cols, tile.cols), 1))](
            qdata.contiguous().view(torch.uint8),
            scale.contiguous(),
            token,
            codes.view(torch.uint8),
            scales,
            tokens,
            rows,
            cols,
            **tile.options,
        )
    return codes, scales


def transpose_payload(
    qdata: Tensor, scale: Tensor, offs: Tensor, token: Tensor | None, after: Tensor | None = None
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
    more = after if token is None else token
    operands = (*operands, offs if more is None else more)
    tile = TRANSPOSED if cols % 16 == 0 else ODD_TRANSPOSED
    grid = (cdiv(rows, tile.rows) * cdiv(cols, tile.cols),)
    flags = {"GATHER": token is not None, **tile.options}
    if rows:
        group_amax_kernel[grid](*operands, bits, tokens, rows, cols, groups, **flags)
    if groups:
        group_scale_kernel[(cdiv(groups * cols, SCALES),)](
            bits, scales, groups * cols, BLOCK=SCALES, num_warps=WARPS
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
        )
    return out

"""Sums over rows or columns that a cast computes from the tiles it has in registers.

Each tile stores its partial sums, about 1 % of the bytes of x, and another launch adds them. The
shape fixes the order, so results repeat bit for bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import positions

# Narrow blocks of columns fill the GPU; 64 rows at a time keep 16 loads in flight per thread.
BLOCK_ROWS = 64
BLOCK_COLS = 32


@quick
@triton.jit(do_not_specialize=["num_partials"])
def reduce_sums_kernel(
    partial_ptr, sum_ptr, num_partials, size, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute sum[c], the sum of partial[p, c] over all p."""
    c = positions(tl.program_id(0), BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(0, num_partials, BLOCK_R):
        p = start + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (p[:, None] < num_partials) & (c[None, :] < size)
        total += tl.load(partial_ptr + p[:, None] * size + c[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + c, tl.sum(total, axis=0), mask=c < size)


@dataclass
class TileSums:
    """Partial sums over the rows of x, or over its columns, one for each tile.

    Attributes:
        axis: 0 to sum over rows, 1 to sum over columns.
        partial: (tiles, columns or rows) float32; None before a cast has allocated it.
    """

    axis: int = 0
    partial: Tensor | None = None

    def allocate(self, x: Tensor, tiles: int) -> Tensor:
        """Allocate memory for the sums of `tiles` tiles along the axis."""
        self.partial = x.new_empty((tiles, x.shape[1 - self.axis]), dtype=torch.float32)
        return self.partial

    def turn(self) -> None:
        """Switch between sums of x and the same sums of x^T."""
        self.axis = 1 - self.axis

    def total(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums, added in float32 and rounded once to `dtype`."""
        if self.partial is None:  # the cast did not run in tiles
            return x.sum(self.axis, dtype=torch.float32).to(dtype)
        tiles, size = self.partial.shape
        total = x.new_empty(size, dtype=dtype)
        reduce_sums_kernel[(cdiv(size, BLOCK_COLS),)](
            self.partial,
            total,
            tiles,
            size,
            BLOCK_R=BLOCK_ROWS,
            BLOCK_C=BLOCK_COLS,
            num_warps=4,
            enable_fp_fusion=True,
        )
        return total

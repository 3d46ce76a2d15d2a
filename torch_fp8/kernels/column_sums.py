"""Sums over rows or columns that a cast makes of the tiles it has in registers anyway.

Each tile stores its partial sums, a hundredth of x in bytes; one more launch adds these up. The
order is fixed by the shape, so a run repeats bit for bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import positions

# Narrow blocks of columns fill the card; 64 rows at a time are 16 loads in flight for each thread.
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
        axis: 0: over rows; 1: over columns.
        partial: (tiles, columns or rows) float32, once a cast has made them.
    """

    axis: int = 0
    partial: Tensor | None = None

    def allocate(self, x: Tensor, tiles: int) -> Tensor:
        """Allocate memory for the sums of `tiles` tiles along the axis."""
        self.partial = x.new_empty((tiles, x.shape[1 - self.axis]), dtype=torch.float32)
        return self.partial

    def turn(self) -> None:
        """Exchange sums of x for sums of x^T, or back."""
        self.axis = 1 - self.axis

    def total(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums, added in float32 and rounded once to `dtype`."""
        if self.partial is None:  # nothing was cast tile by tile
            return x.sum(self.axis, dtype=torch.float32).to(dtype)
        tiles, size = self.partial.shape
        total = x.new_empty(size, dtype=dtype)
        with torch.cuda.device_of(x):
            reduce_sums_kernel[(cdiv(size, BLOCK_COLS),)](
                self.partial,
                total,
                tiles,
                size,
                BLOCK_R=BLOCK_ROWS,
                BLOCK_C=BLOCK_COLS,
                num_warps=4,
            )
        return total

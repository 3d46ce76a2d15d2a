"""Shapes of FP8 payloads and their scales, with the padding that GEMMs need.

Legend: R rows, C columns of a matrix x; ``row`` is x quantized along C, (R, C), and ``col`` is x^T
quantized along R, (C, R'). R' (`padded_rows`) is R rounded up to the multiple over which a GEMM
contracts. The padding is zeros, which add nothing to a sum. So any number of tokens works, at the
cost of the next multiple.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_fp8.quantization.formats import GEMM_ALIGNMENT

Layouts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Results of a cast: qdata (R, C) and its scale, qdata (C, R') of x^T and its scale.

Each is None if not requested. Tensorwise, the second one is the scale of both, or None if the
caller passed the scale.
"""


class Sharing(NamedTuple):
    """What a granularity's name stands for.

    Attributes:
        block: numbers of rows and columns that share a scale; 0 for all.
        pads_rows_to: the multiple to which R is rounded up in R'.
        cards: CUDA compute capabilities whose scaled matmul supports it, the first and the last.
    """

    block: tuple[int, int]
    pads_rows_to: int
    cards: tuple[tuple[int, int], tuple[int, int]]


# Block scales of 128 need Hopper and CUDA 12.9 (cuBLASLt); MX block scales need Blackwell's tensor
# cores. Rows of squares are those of weights, not tokens.
GRANULARITIES = {
    "tensorwise": Sharing((0, 0), GEMM_ALIGNMENT, ((8, 9), (99, 9))),
    "rowwise": Sharing((1, 0), GEMM_ALIGNMENT, ((8, 9), (99, 9))),
    "block_1x128": Sharing((1, 128), 128, ((9, 0), (9, 0))),
    "block_128x128": Sharing((128, 128), 1, ((9, 0), (9, 0))),
    "block_1x32": Sharing((1, 32), GEMM_ALIGNMENT, ((10, 0), (99, 9))),
}
BLOCK_SHAPE = {name: g.block for name, g in GRANULARITIES.items() if g.block[1]}
"""Numbers of rows and columns that share a scale, where they are blocks."""
SQUARE = tuple(name for name, g in GRANULARITIES.items() if g.block[0] == g.block[1])
"""Granularities in which a matrix and its transpose have the same scales."""
IN_ROWS = tuple(name for name in BLOCK_SHAPE if name not in SQUARE)
"""Granularities whose blocks are parts of one row."""
E8M0_ROWS = 128
"""Rows of a tile of block_1x32's scales in the GEMMs' layout; see `gemm_operand`."""


def is_known(size: int) -> bool:
    """Return whether a size is a number; a graph that serves several lengths has symbolic ones."""
    return type(size) is int


def is_aligned(size: int) -> bool:
    """Return whether a size, in a graph, is known to need no padding; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(size > 0) and statically_known_true(size % GEMM_ALIGNMENT == 0)


def padded_rows(rows: int, granularity: str) -> int:
    """Return R' of a matrix with `rows` rows."""
    multiple = GRANULARITIES[granularity].pads_rows_to
    return -(-rows // multiple) * multiple


def scale_shape(rows: int, cols: int, granularity: str) -> tuple[int, ...]:
    """Return the shape of the scale of a (rows, cols) payload, unless it is tensorwise."""
    block_rows, block_cols = GRANULARITIES[granularity].block
    return (cdiv(rows, block_rows), cdiv(cols, block_cols) if block_cols else 1)


def new_group_scales(x: Tensor, rows: int, cols: int, group: int = 128) -> Tensor:
    """Allocate a float32 scale per row and `group` columns, (rows, ceil(cols / group)).

    For groups of 128, memory is block by block (strides (1, rows padded to 16)), because GEMMs read
    rows in multiples of 16. For groups of 32, memory is row by row, padded to a multiple of 128
    rows, as in the tiles that a GEMM reads.
    """
    blocks = cdiv(cols, group)
    if group == 128:
        room = multiple_of_16(rows)
        scales = x.new_empty((blocks, room), dtype=torch.float32).t()
    else:
        room = cdiv(rows, E8M0_ROWS) * E8M0_ROWS
        scales = x.new_empty((room, blocks), dtype=torch.float32)
    return scales if is_known(rows) and room == rows else scales[:rows]


def new_scales(x: Tensor, rows: int, cols: int, granularity: str) -> Tensor:
    """Allocate the float32 scales of a (rows, cols) payload, unless it is tensorwise."""
    if granularity in IN_ROWS:
        return new_group_scales(x, rows, cols, BLOCK_SHAPE[granularity][1])
    return x.new_empty(scale_shape(rows, cols, granularity), dtype=torch.float32)


def new_scale(x: Tensor) -> Tensor:
    """Allocate a float32 scalar ().

    In a graph it is a view of one element, because Inductor launches a kernel for an empty ().
    """
    if isinstance(x, FunctionalTensor):
        return x.new_empty(1, dtype=torch.float32).view(())
    return x.new_empty((), dtype=torch.float32)


def new_payload(x: Tensor, rows: int, cols: int, dtype: torch.dtype, granularity: str) -> Tensor:
    """Allocate a (rows, cols) payload.

    For block_1x128, memory is padded to a multiple of 16 rows, which a GEMM needs.
    """
    room = multiple_of_16(rows) if granularity == "block_1x128" else rows
    payload = x.new_empty((room, cols), dtype=dtype)
    return payload if is_known(rows) and room == rows else payload[:rows]


def multiple_of_16(rows: int) -> int:
    """Round `rows` up to a multiple of 16."""
    return -(-rows // GEMM_ALIGNMENT) * GEMM_ALIGNMENT


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return -(-x // y)

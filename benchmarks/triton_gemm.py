"""A block-scaled FP8 GEMM in Triton, which `bench_gemm` compares with torch's scaled matmul.

``C = A B^T`` on the payloads and scales of `torch_fp8.ops.quantize`. A program sums one tile of C
over blocks of 128 in order: the tensor core multiplies one block, whose result is scaled and added
up in float32. That is the promotion that Hopper needs, whose FP8 accumulator is narrower than
float32; within a block, four instructions long, it accumulates as it does. No sum is split, so
every run gives the same bits.

TMA loads operands into shared memory and fills with zeros outside of them, so no number of rows
needs a copy, whereas torch's operator needs padded rows and transposed square scales. A contraction
dimension that is not a multiple of 16 is padded, because TMA requires that.

No card has measured yet which tile is the fastest, and whether one beats torch's GEMM; each tile
has its own rows. Until then the kernel stays out of the library. Legend: R rows of A and C, S rows
of B and columns of C, C contracted.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.formats import GEMM_ALIGNMENT

BLOCK = 128
"""The number of elements along the contraction that share a scale and are multiplied at a time."""
GROUP = 8
"""Tiles of rows that programs at a time share columns of B with: both meet in the L2 cache."""


class Tile(NamedTuple):
    """The tile of C that a program computes, and its resources.

    Attributes:
        rows, cols: size in C; the columns, which lie in one square block of B, divide 128.
        warps: of a program. A thread holds the tile's sums and the block's, so that 64 x 128
            elements for four of them are the most that registers take.
        stages: blocks of A and B in shared memory at a time.
    """

    rows: int
    cols: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


TILES = (
    Tile(128, 128, warps=8, stages=4),
    Tile(256, 64, warps=8, stages=4),
    # Two programs on a multiprocessor: one multiplies while the other adds up.
    Tile(64, 128, warps=4, stages=4),
    Tile(128, 64, warps=4, stages=4),
)


def runs_triton_gemm(device: torch.device) -> bool:
    """Return whether `device` has FP8 tensor cores and TMA: CUDA compute capability 9.0 or
    later.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def blockwise_gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    tile: Tile,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``dequantize(a) @ dequantize(b).T + bias``, rounded once.

    Args:
        a: (R, C) of block_1x128, E4M3 or E5M2.
        b: (S, C) of block_1x128 or block_128x128, E4M3 or E5M2.
        out_dtype: float32, bfloat16 or float16.
        tile: one of `TILES`.
        bias: (S,) of any floating dtype, or None.
    Returns:
        (R, S) of `out_dtype`.
    Raises:
        ValueError: other granularities.
    """
    if a.granularity != "block_1x128" or b.granularity not in ("block_1x128", "block_128x128"):
        raise ValueError(
            "the Triton GEMM takes block_1x128 with block_1x128 or block_128x128, got "
            f"{a.granularity} with {b.granularity}"
        )
    from triton.tools.tensor_descriptor import TensorDescriptor

    from benchmarks import triton_gemm_kernel as kernels  # Triton is imported where it is used

    square = b.granularity == "block_128x128"
    # The scales of a block of columns lie next to each other, with room behind them.
    assert a.scale.stride(0) == 1
    assert b.scale.is_contiguous() if square else b.scale.stride(0) == 1
    rows, (cols, contracted) = a.qdata.shape[0], b.qdata.shape
    out = torch.empty(rows, cols, dtype=out_dtype, device=a.qdata.device)
    if 0 in (rows, cols, contracted):
        return out.zero_() if bias is None else out.copy_(bias.expand(rows, cols))
    programs = -(-rows // tile.rows) * -(-cols // tile.cols)
    with torch.cuda.device_of(out):
        kernels.blockwise_gemm_kernel[(programs,)](
            TensorDescriptor.from_tensor(_padded(a.qdata), [tile.rows, BLOCK]),
            TensorDescriptor.from_tensor(_padded(b.qdata), [tile.cols, BLOCK]),
            a.scale,
            b.scale,
            out if bias is None else bias,
            out,
            rows,
            cols,
            -(-contracted // BLOCK),
            a.scale.stride(1),
            b.scale.stride(1),
            SQUARE=square,
            BIAS=bias is not None,
            TILE_R=tile.rows,
            TILE_S=tile.cols,
            BLOCK=BLOCK,
            GROUP=GROUP,
            STAGES=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=True,
        )
    return out


def _padded(qdata: Tensor) -> Tensor:
    padding = -qdata.shape[1] % GEMM_ALIGNMENT
    if padding == 0:
        return qdata
    return F.pad(qdata.view(torch.uint8), (0, padding)).view(qdata.dtype)

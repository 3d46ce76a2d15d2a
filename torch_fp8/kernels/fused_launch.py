"""Functions shared by the launchers of fused producers (norms, activations that cast their result).

Legend: R rows, C columns of the result; rowwise: the result quantized along C; columnwise: its
transpose quantized along R.
"""

import torch
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    cast_flags,
)
from torch_fp8.quantization.payload_shape import COL_ALIGNMENT, Layouts, new_group_scales

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
GROUPS = {"block_1x128": 128, "block_1x32": 32}


def fits_tiles(options: CastOptions, *inputs: Tensor) -> bool:
    """Return whether one launch can compute a result and cast it in tiles.

    Rowwise scales span more than a tile. If C is not a multiple of 16, elements move one at a time,
    each with an address and a mask in registers, and FP8 GEMMs reject the result anyway. Both are
    computed first and then cast. R is arbitrary, except for 128 x 128 blocks in the column layout,
    which is not padded.
    """
    granularity = options.granularity
    assert granularity == "tensorwise" or (options.amax is None and options.scale is None)
    rows, cols = inputs[0].shape
    unpadded = options.columnwise and COL_ALIGNMENT[granularity] == 1
    odd = cols % 16 or (unpadded and rows % 16) or any(x.stride(1) != 1 for x in inputs)
    return granularity != "rowwise" and not odd and inputs[0].numel() > 0


def scale_source(options: CastOptions, unused: Tensor) -> Tensor:
    """Return the tensor with the scale, or the bits of the amax, for `tiles.store_cast`."""
    if options.scale is not None:
        return options.scale
    return unused if options.amax is None else options.amax.view(torch.int32)


def fused_flags(options: CastOptions, whole: bool = False) -> dict[str, object]:
    """Return the compile-time arguments of a kernel that computes and casts its result.

    Args:
        whole: whether one tile holds the whole result; required if the amax is not known.
    """
    assert whole == options.needs_amax
    if whole:
        source = "whole"
    elif options.granularity == "tensorwise":
        source = "amax" if options.scale is None else "given"
    else:
        source = "square" if options.granularity == "block_128x128" else "groups"
    return {
        "SCALE": source,
        "GROUP": GROUPS.get(options.granularity, BLOCK),
        **cast_flags(options),
    }


def no_cast(made: Layouts) -> dict[str, object]:
    """Return `fused_flags` for a kernel that stores its result without a cast, or not at all."""
    how = {"GROUP": BLOCK, "E5M2": False, "POWER_OF_TWO": False, "COL": False}
    return {"SCALE": "plain", **how, "ROW": made[0] is not None}


def saved_outputs(x: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Allocate codes and scales to save x for backward, or return (None, None)."""
    if not wanted:
        return None, None
    rows, cols = x.shape
    return x.new_empty((rows, cols), dtype=torch.float8_e4m3fn), new_group_scales(x, rows, cols)


def registers(warps: int) -> int:
    """Return the registers per thread if a multiprocessor runs one program at a time.

    This limit is for kernels of a single program, or with one mask too many for their registers.
    Without it the assembler uses half as many for most of them, so that two programs fit, and
    spills a few bytes.
    """
    return min(65536 // (32 * warps), 255)


def amax_bits(x: Tensor, *shape: int) -> Tensor:
    """Allocate int32 bits of amaxes, zeros that kernels raise."""
    return x.new_zeros(shape, dtype=torch.int32)

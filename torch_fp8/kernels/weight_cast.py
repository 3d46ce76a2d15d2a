"""The optimizer step's second kernel: casts the new weights to their FP8 payloads, E4M3.

A scale is shared by 128 x 128 weights or by all of them, and the amax of all is known only after
the last one. So one launch follows the step and casts every weight of a class: 2 bytes read and 1
written for each element, in the payload's memory, which graphs read. The bytes equal those of
`torch_fp8.ops.quantize.quantize_layouts`.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.adamw_record import AT, RECORD, integer, pointer
from torch_fp8.kernels.block_layout import at_origin, places
from torch_fp8.kernels.fp8_cast import abs_bits, cast_bounded, scale_from_amax


@triton.jit
def cast_weights_kernel(
    table_ptr,
    chunk_ptr,
    WEIGHT: tl.constexpr,
    SQUARES: tl.constexpr,  # a scale for each square of 128 x 128; False: from the weight's amax
    POWER_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a tile
):
    """Cast the square of each program, and store its scale, or that of the weight."""
    record = table_ptr + tl.load(chunk_ptr + tl.program_id(0)) * RECORD
    first = (tl.program_id(0) - integer(record, AT.value.first_chunk)) * 512
    rows, cols = integer(record, AT.value.rows), integer(record, AT.value.cols)
    weight_ptr = at_origin(pointer(record, AT.value.weight, WEIGHT), first, cols, "squares")
    payload_ptr = at_origin(pointer(record, AT.value.payload, tl.uint8), first, cols, "squares")
    scale_ptr = pointer(record, AT.value.payload_scale, tl.float32)
    if SQUARES:
        scale_ptr += first // 512
        largest = tl.zeros((GROUPS, 32), dtype=tl.int32)
        for done in range(0, 512, GROUPS):
            weight, _, mask = _weights(weight_ptr, first, done, rows, cols, GROUPS)
            largest = tl.maximum(largest, tl.where(mask, abs_bits(weight), 0))
        amax_bits = tl.max(tl.max(largest, axis=1), axis=0)
    else:
        amax_bits = tl.load(pointer(record, AT.value.amax, tl.int32))
    scale = scale_from_amax(amax_bits, 448.0, POWER_OF_TWO)
    if SQUARES or first == 0:
        tl.store(scale_ptr, scale)
    for done in range(0, 512, GROUPS):
        weight, position, mask = _weights(weight_ptr, first, done, rows, cols, GROUPS)
        codes = cast_bounded(weight, scale, False, POWER_OF_TWO)
        tl.store(payload_ptr + position, codes, mask=mask)


@triton.jit
def _weights(weight_ptr, first, done, rows, cols, GROUPS: tl.constexpr):
    """Load a tile (G, 32) of a square from group `done` on; return it with positions and mask."""
    local = done + tl.arange(0, GROUPS)
    position, mask, _, _ = places(first, local, 0, cols, "squares", rows=rows)
    return tl.load(weight_ptr + position, mask=mask, other=0.0).to(tl.float32), position, mask

"""The kernels of `torch_fp8.kernels.adamw`.

One launch updates many matrices (R, K). A program works tile by tile on a chunk: CHUNK consecutive
groups of one matrix. `chunk_ptr` holds each program's index into the `Record`s of `table_ptr`.

The step moves about 14 bytes per element, which at 4 TB/s leaves time for 100 instructions. So each
thread has 16 consecutive elements and moves 16 bytes per access; a program is a single warp, which
waits for no other; roots and quotients have no branches (`fast_math`). Multiply-adds are not fused
(`enable_fp_fusion=False`), so they round as in the reference.

`cast_weights_kernel` casts the new weights to their FP8 payloads, E4M3.

A scale is shared by 128 x 128 weights or by all of them, and the amax of all is known only after
the last one. So one launch follows the step and casts every weight of a class: 2 bytes read and 1
written for each element, in the payload's memory, which graphs read. The bytes equal those of
`torch_fp8.ops.quantize.quantize_layouts`.
"""

from collections import namedtuple

import triton
import triton.language as tl

from torch_fp8.kernels.block_scaled import (
    GRADIENT,
    MOMENT1,
    MOMENT2,
    at_origin,
    decode,
    encode,
    places,
    scale_of,
    scale_places,
    scales_at_origin,
)
from torch_fp8.kernels.fast_math import random_words, scaled_quotient, second_words, square_root
from torch_fp8.kernels.fp8_cast import abs_bits, cast_bounded, scale_from_amax

_INF = tl.constexpr(float("inf"))
_NAN_BITS = tl.constexpr(0x7FC00000)

Record = namedtuple(
    "Record",
    "weight residual grad grad_scale grad_multiplier exp_avg exp_avg_scale exp_avg_sq "
    "exp_avg_sq_scale lr_multiplier update_rms amax payload payload_scale blank first_chunk "
    "num_groups rows cols row_length start key0 key1 grad_sign beta1_complement beta2 "
    "beta2_complement step_size inv_sqrt_correction eps decay weight_decay",
)
"""One matrix, in 64-bit fields: addresses, integers or the bits of a float32.

Addresses come before `blank`, 0 for a tensor that does not exist; floats start with `grad_sign`.
`row_length` and `start` are modulo 2^32, because they are indices of random words. The number of
fields is even, so the data behind the table in memory is aligned to 16 bytes.
"""
RECORD = tl.constexpr(len(Record._fields))
AT = tl.constexpr(Record(*range(len(Record._fields))))


@triton.jit
def integer(record, FIELD: tl.constexpr):
    """Load the lower 32 bits of a field."""
    return tl.load(record + FIELD).to(tl.int32)


@triton.jit
def number(record, FIELD: tl.constexpr):
    """Load the float32 in a field."""
    return integer(record, FIELD).to(tl.float32, bitcast=True)


@triton.jit
def factor(record, FIELD: tl.constexpr):
    """Load the () float32 whose address is in a field, or return 1 if the address is 0."""
    address = tl.load(record + FIELD)
    return tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=1.0)


@triton.jit
def pointer(record, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    """Load an address as a pointer to DTYPE."""
    return tl.load(record + FIELD).to(tl.pointer_type(DTYPE))


@triton.jit
def join(weight, residual, RESIDUAL: tl.constexpr):
    """Join bfloat16 weights and int8 residuals, if there are any, to (G, 32) float32."""
    high = weight.to(tl.float32)
    if RESIDUAL:
        word = high.to(tl.int32, bitcast=True) + (residual.to(tl.int32) << 8)
        joined = word.to(tl.float32, bitcast=True)
        # A stale residual can turn Inf into a number or zero into NaN; the difference isn't finite.
        high = tl.where(tl.abs(joined - high) < _INF, joined, high)
    return high


@triton.jit
def split(weight, words, RESIDUAL: tl.constexpr):
    """Round float32 stochastically and split it into bfloat16 and an int8 residual.

    Without RESIDUAL, round to bfloat16; the second result is then of no use.
    """
    DROPPED: tl.constexpr = 8 if RESIDUAL else 16
    HALF: tl.constexpr = 0x8000 if RESIDUAL else 0
    offset = words.to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    # The offset cannot carry out of an Inf, whose lower bits are 0. The hardware's NaN is all ones
    # but for the sign, and would overflow.
    word = tl.minimum(weight.to(tl.int32, bitcast=True), _NAN_BITS) + offset
    high = ((word + HALF) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (word >> DROPPED).to(tl.int8)


@triton.jit
def _gradient(grad, scale_ptr, local, inside, factor):
    """Load a gradient of bfloat16, float32 or 8-bit codes as float32, times `factor`."""
    if grad.dtype == tl.uint8:
        scale = tl.load(scale_ptr + local, mask=inside, other=127)
        grad = decode(grad, scale, GRADIENT)
    return grad.to(tl.float32) * factor


@triton.jit
def adamw_step_kernel(
    table_ptr,
    chunk_ptr,
    WEIGHT: tl.constexpr,
    RESIDUAL: tl.constexpr,  # whether the weight has one
    GRAD: tl.constexpr,  # uint8: 8-bit gradient
    LAYOUT: tl.constexpr,
    AMAX: tl.constexpr,  # whether to raise the amax to that of the new weights
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a tile
):
    """Run `torch_fp8.ops.adamw.adamw_step_reference`."""
    record = table_ptr + tl.load(chunk_ptr + tl.program_id(0)) * RECORD
    first = (tl.program_id(0) - integer(record, AT.value.first_chunk)) * CHUNK
    num_groups, cols = integer(record, AT.value.num_groups), integer(record, AT.value.cols)
    rows = integer(record, AT.value.rows)
    row_length, start = integer(record, AT.value.row_length), integer(record, AT.value.start)
    key0, key1 = integer(record, AT.value.key0), integer(record, AT.value.key1)
    grad_factor = factor(record, AT.value.grad_multiplier) * number(record, AT.value.grad_sign)
    lr_multiplier = factor(record, AT.value.lr_multiplier)
    step_size = number(record, AT.value.step_size) * lr_multiplier
    decay = number(record, AT.value.decay)
    decay += (1.0 - decay) * (1.0 - lr_multiplier)
    beta1_complement = number(record, AT.value.beta1_complement)
    beta2 = number(record, AT.value.beta2)
    beta2_complement = number(record, AT.value.beta2_complement)
    inv_sqrt_correction = number(record, AT.value.inv_sqrt_correction)
    eps = number(record, AT.value.eps)
    weight_decay = number(record, AT.value.weight_decay)

    weight_ptr = pointer(record, AT.value.weight, WEIGHT)
    weight_ptr = at_origin(weight_ptr, first, cols, LAYOUT)
    grad_ptr = pointer(record, AT.value.grad, GRAD)
    grad_ptr = at_origin(grad_ptr, first, cols, LAYOUT)
    exp_avg_ptr = pointer(record, AT.value.exp_avg, tl.uint8)
    exp_avg_ptr = at_origin(exp_avg_ptr, first, cols, LAYOUT)
    exp_avg_scale_ptr = pointer(record, AT.value.exp_avg_scale, tl.uint8)
    exp_avg_scale_ptr = scales_at_origin(exp_avg_scale_ptr, first, cols, LAYOUT)
    exp_avg_sq_ptr = pointer(record, AT.value.exp_avg_sq, tl.uint8)
    exp_avg_sq_ptr = at_origin(exp_avg_sq_ptr, first, cols, LAYOUT)
    residual_ptr = pointer(record, AT.value.residual, tl.int8)
    residual_ptr = at_origin(residual_ptr, first, cols, LAYOUT)
    grad_scale_ptr = pointer(record, AT.value.grad_scale, tl.uint8)
    grad_scale_ptr = scales_at_origin(grad_scale_ptr, first, cols, LAYOUT)
    exp_avg_sq_scale_ptr = pointer(record, AT.value.exp_avg_sq_scale, tl.uint8)
    exp_avg_sq_scale_ptr = scales_at_origin(exp_avg_sq_scale_ptr, first, cols, LAYOUT)

    largest = tl.zeros((GROUPS, 32), dtype=tl.int32)
    for done in range(0, tl.minimum(num_groups - first, CHUNK), GROUPS):
        local = done + tl.arange(0, GROUPS)
        position, mask, row, col = places(first, local, num_groups, cols, LAYOUT, rows)
        at_scale, inside = scale_places(first, local, num_groups, cols, LAYOUT, rows)
        weight = tl.load(weight_ptr + position, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + position, mask=mask, other=0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + position, mask=mask, other=0)
        exp_avg_sq_scale = tl.load(exp_avg_sq_scale_ptr + at_scale, mask=inside, other=127)
        residual = 0
        if RESIDUAL:
            residual = tl.load(residual_ptr + position, mask=mask, other=0)

        weight = join(weight, residual, RESIDUAL)
        grad = _gradient(grad, grad_scale_ptr, at_scale, inside, grad_factor)
        if weight_decay != 0.0:
            grad += weight * weight_decay
        weight *= decay
        exp_avg_sq = decode(exp_avg_sq, exp_avg_sq_scale, MOMENT2)
        exp_avg = tl.load(exp_avg_ptr + position, mask=mask, other=0)
        exp_avg_scale = tl.load(exp_avg_scale_ptr + at_scale, mask=inside, other=127)
        exp_avg = decode(exp_avg, exp_avg_scale, MOMENT1)
        exp_avg += (grad - exp_avg) * beta1_complement
        exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * beta2_complement
        exp_avg_scale = scale_of(exp_avg, MOMENT1)
        exp_avg_sq_scale = scale_of(exp_avg_sq, MOMENT2)
        root = square_root(exp_avg_sq, exp_avg_sq_scale, inv_sqrt_correction)
        weight -= scaled_quotient(exp_avg, exp_avg_scale, root + eps, step_size)

        index = (start + row * row_length)[:, None] + col
        words = random_words(index, key0, key1)
        tl.store(exp_avg_sq_scale_ptr + at_scale, exp_avg_sq_scale, mask=inside)
        codes = encode(exp_avg_sq, exp_avg_sq_scale, words >> 12, MOMENT2)
        tl.store(exp_avg_sq_ptr + position, codes, mask=mask)
        tl.store(exp_avg_scale_ptr + at_scale, exp_avg_scale, mask=inside)
        offset = ((words >> 8) & 0xFF) << 12 | 1 << 11
        codes = encode(exp_avg, exp_avg_scale, offset, MOMENT1)
        tl.store(exp_avg_ptr + position, codes, mask=mask)
        if tl.float32 == WEIGHT:
            tl.store(weight_ptr + position, weight, mask=mask)
        else:
            if not RESIDUAL:
                words = second_words(words, key0, key1)
            weight, residual = split(weight, words, RESIDUAL)
            tl.store(weight_ptr + position, weight, mask=mask)
            if RESIDUAL:
                tl.store(residual_ptr + position, residual, mask=mask)
        if AMAX:
            magnitude = abs_bits(weight.to(tl.float32))
            largest = tl.maximum(largest, tl.where(mask, magnitude, 0))

    if AMAX:
        # Magnitudes compare like their bit patterns; the order of the updates does not matter.
        amax_ptr = pointer(record, AT.value.amax, tl.int32)
        tl.atomic_max(amax_ptr, tl.max(tl.max(largest, axis=1), axis=0), sem="relaxed")


@triton.jit
def update_squares_kernel(
    table_ptr,
    chunk_ptr,
    partial_ptr,
    WEIGHT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GRAD: tl.constexpr,
    LAYOUT: tl.constexpr,
    COUPLED: tl.constexpr,  # whether g includes weight decay; only then are weights read
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write into partial[program] the sum of g^2 / max(v_hat, eps^2) over its chunk."""
    record = table_ptr + tl.load(chunk_ptr + tl.program_id(0)) * RECORD
    first = (tl.program_id(0) - integer(record, AT.value.first_chunk)) * CHUNK
    num_groups, cols = integer(record, AT.value.num_groups), integer(record, AT.value.cols)
    grad_factor = factor(record, AT.value.grad_multiplier) * number(record, AT.value.grad_sign)
    beta2 = number(record, AT.value.beta2)
    beta2_complement = number(record, AT.value.beta2_complement)
    inv_sqrt_correction = number(record, AT.value.inv_sqrt_correction)
    eps = number(record, AT.value.eps)
    weight_decay = number(record, AT.value.weight_decay)

    weight_ptr = pointer(record, AT.value.weight, WEIGHT)
    weight_ptr = at_origin(weight_ptr, first, cols, LAYOUT)
    grad_ptr = pointer(record, AT.value.grad, GRAD)
    grad_ptr = at_origin(grad_ptr, first, cols, LAYOUT)
    exp_avg_sq_ptr = pointer(record, AT.value.exp_avg_sq, tl.uint8)
    exp_avg_sq_ptr = at_origin(exp_avg_sq_ptr, first, cols, LAYOUT)
    residual_ptr = pointer(record, AT.value.residual, tl.int8)
    residual_ptr = at_origin(residual_ptr, first, cols, LAYOUT)
    grad_scale_ptr = pointer(record, AT.value.grad_scale, tl.uint8) + first
    exp_avg_sq_scale_ptr = pointer(record, AT.value.exp_avg_sq_scale, tl.uint8) + first

    total = tl.zeros((GROUPS, 32), dtype=tl.float32)
    for done in range(0, tl.minimum(num_groups - first, CHUNK), GROUPS):
        local = done + tl.arange(0, GROUPS)
        inside = first + local < num_groups
        position, mask, _, _ = places(first, local, num_groups, cols, LAYOUT)
        grad = tl.load(grad_ptr + position, mask=mask, other=0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + position, mask=mask, other=0)
        exp_avg_sq_scale = tl.load(exp_avg_sq_scale_ptr + local, mask=inside, other=127)
        grad = _gradient(grad, grad_scale_ptr, local, inside, grad_factor)
        if COUPLED:
            weight = tl.load(weight_ptr + position, mask=mask, other=0.0)
            residual = 0
            if RESIDUAL:
                residual = tl.load(residual_ptr + position, mask=mask, other=0)
            grad += join(weight, residual, RESIDUAL) * weight_decay
        exp_avg_sq = decode(exp_avg_sq, exp_avg_sq_scale, MOMENT2)
        exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * beta2_complement
        unbiased = exp_avg_sq * inv_sqrt_correction * inv_sqrt_correction
        floor = eps * eps
        unbiased = tl.where(unbiased < floor, floor, unbiased)  # keeps NaN
        total += tl.where(mask, (grad * grad) / unbiased, 0.0)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def update_rms_kernel(table_ptr, partial_ptr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Compute sqrt(sum of a matrix's partial sums / its elements), in a fixed order."""
    record = table_ptr + tl.program_id(0) * RECORD
    first = integer(record, AT.value.first_chunk)
    num_chunks = tl.cdiv(integer(record, AT.value.num_groups), CHUNK)
    total = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    for done in range(0, num_chunks, BLOCK_SIZE):
        chunk = done + tl.arange(0, BLOCK_SIZE)
        total += tl.load(partial_ptr + first + chunk, mask=chunk < num_chunks, other=0.0)
    rows, cols = integer(record, AT.value.rows), integer(record, AT.value.cols)
    mean = tl.sum(total, axis=0) / (rows.to(tl.float32) * cols.to(tl.float32))
    address = tl.load(record + AT.value.update_rms)
    tl.store(address.to(tl.pointer_type(tl.float32)), tl.sqrt_rn(mean))


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

"""The record of a matrix that the optimizer kernels read, and functions to load its fields."""

from collections import namedtuple

import triton
import triton.language as tl

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

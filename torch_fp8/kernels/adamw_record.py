"""The record of a matrix that the optimizer kernels read, and functions to load its fields."""

from typing import NamedTuple

import triton
import triton.language as tl


class Record(NamedTuple):
    """One matrix, in 64-bit fields: addresses, integers or the bits of a float32.

    The number of fields is even, so the data behind the table in memory is aligned to 16 bytes.
    """

    weight: int
    residual: int
    grad: int
    grad_scale: int
    grad_multiplier: int  # 0: none
    exp_avg: int
    exp_avg_scale: int
    exp_avg_sq: int
    exp_avg_sq_scale: int
    lr_multiplier: int  # 0: none
    update_rms: int
    amax: int  # 0: none
    payload: int  # 0: none, as the next
    payload_scale: int
    blank: int
    first_chunk: int
    num_groups: int
    rows: int
    cols: int
    row_length: int  # modulo 2^32, as `start`: indices of random words
    start: int
    key0: int
    key1: int
    grad_sign: int
    beta1_complement: int
    beta2: int
    beta2_complement: int
    step_size: int
    inv_sqrt_correction: int
    eps: int
    decay: int
    weight_decay: int


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

"""PTX's arithmetic on arrays: one value for each thread, or a scalar that all threads share."""

from typing import Any

import numpy as np

Values = Any
"""An array of a NumPy type, or a scalar of it."""

NAN32 = np.uint32(0x7FFFFFFF)
_HALF, _BELOW = np.uint64(1 << 28), np.uint64((1 << 29) - 1)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)
_U8, _U32, _U64, _F32, _F64 = np.uint8, np.uint32, np.uint64, np.float32, np.float64


def bits_of(x: Values) -> Values:
    """Return the bits of float32 results, of which each NaN is PTX's."""
    nan = np.isnan(x)
    bits = x.view(_U32)
    return np.where(nan, NAN32, bits) if np.any(nan) else bits


def flush(x: Values) -> Values:
    return np.where(np.abs(x) < _F32(_SMALLEST), np.copysign(_F32(0), x), x)


def fma(a: Values, b: Values, c: Values) -> Values:
    """Compute a * b + c of float32, rounded once.

    A product is exact in float64. The sum is rounded there; that another rounding to float32 makes
    a difference is possible only where it lies halfway between two of them, or is subnormal.
    """
    product, addend = a.astype(_F64) * b.astype(_F64), c.astype(_F64)
    total = product + addend
    bits = total.view(_U64)
    doubtful = (bits & _BELOW) == _HALF
    doubtful |= (np.abs(total) < _SMALLEST) & (total != 0)  # a sum of 0 is exact
    if np.any(doubtful):
        parts = np.broadcast_arrays(total, product, addend)
        total = np.array(total)
        total[doubtful] = _to_odd(*(part[doubtful] for part in parts))
    return total.astype(_F32)


def _to_odd(total: Values, product: Values, addend: Values) -> Values:
    """Return a sum whose last bit is odd where it is not exact, so that it can be rounded again."""
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(_U64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & _U64(1)) == 0)
    away = (error > 0) == (total > 0)
    odd = np.where(away, bits + _U64(1), bits - _U64(1))
    return np.where(inexact, odd, bits).view(_F64)


def pairs(x: Values, count: int) -> Values:
    return (np.full(count, x) if np.ndim(x) == 0 else x).view(_F32)


def divide(a: Values, b: Values) -> Values:
    quotient = np.trunc(a.astype(_F64) / b.astype(_F64))
    known = np.where(b == 0, _F64(0), quotient)
    return np.where(b == 0, ~np.zeros_like(b), known.astype(np.int64).astype(b.dtype))


def divide_64(a: Values, b: Values) -> Values:
    safe = np.where(b == 0, b.dtype.type(1), b)
    down = a // safe
    inexact = (a - down * safe) != 0
    quotient = np.where(inexact & ((a < 0) != (safe < 0)), down + b.dtype.type(1), down)
    return np.where(b == 0, ~np.zeros_like(b), quotient)


def shift_left(x: Values, amount: Values) -> Values:
    bits = x.dtype.type(8 * x.dtype.itemsize)
    amount = amount.astype(x.dtype)
    return np.where(amount < bits, x << (amount % bits), x.dtype.type(0))


def shift_right(x: Values, amount: Values) -> Values:
    bits = 8 * x.dtype.itemsize
    most = np.minimum(amount.astype(np.int64), bits - 1).astype(x.dtype)
    shifted = x >> most
    return shifted if x.dtype.kind == "i" else np.where(amount < bits, shifted, x.dtype.type(0))


def permute(a: Values, b: Values, selector: Values) -> Values:
    """Compute `prmt.b32`: four of the eight bytes of a and b, or their signs."""
    both = a.astype(_U64) | (b.astype(_U64) << _U64(32))
    if np.ndim(selector) == 0 and not int(selector) & 0x8888 and np.ndim(both):
        octets = np.ascontiguousarray(both).view(np.uint8).reshape(-1, 8)
        places = [(int(selector) >> 4 * i) & 7 for i in range(4)]
        return np.ascontiguousarray(octets[:, places]).view(_U32).reshape(both.shape)
    result: Values = _U32(0)
    for i in range(4):
        nibble = (selector >> _U32(4 * i)) & _U32(15)
        place = ((nibble & _U32(7)) << _U32(3)).astype(_U64)
        byte = ((both >> place) & _U64(255)).astype(_U32)
        sign = np.where(byte & _U32(128), _U32(255), _U32(0))
        result = result | (np.where(nibble & _U32(8), sign, byte) << _U32(8 * i))
    return result


def extract(x: Values, position: int, length: int) -> Values:
    """Compute `bfe` with a field that the text names, within 32 bits; x is signed or not."""
    bits = 32
    if length == 0:
        return x.dtype.type(0) * x
    length = min(length, bits - position)
    left = x << x.dtype.type(bits - position - length)
    return left >> x.dtype.type(bits - length)


def popcount(x: Values) -> Values:
    return np.bitwise_count(x).astype(_U32)


def leading_zeros(x: Values) -> Values:
    return (_U32(32) - np.ceil(np.log2(x.astype(_F64) + 1)).astype(_U32)).astype(_U32)


def look_up(a: Values, b: Values, c: Values, table: int) -> Values:
    result: Values = _U32(0)
    for i in range(8):
        if table >> i & 1:
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result = result | term
    return result

"""PTX's conversions between formats, on bits; to nearest, ties to even, or to integers toward 0."""

from typing import Any

import numpy as np

Values = Any
_U8, _U16, _U32, _F16, _F32 = np.uint8, np.uint16, np.uint32, np.float16, np.float32


def bf16_of(x: Values) -> Values:
    bits = x.view(_U32)
    rounded = (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)
    return np.where(np.isnan(x), _U16(0x7FFF), rounded.astype(_U16))


def f32_of_bf16(x: Values) -> Values:
    return (x.astype(_U32) << _U32(16)).view(_F32)


def i32_of(x: Values) -> Values:
    within = np.clip(np.where(np.isnan(x), _F32(0), x).astype(np.float64), -(2**31), 2**31 - 1)
    return np.trunc(within).astype(np.int32)


def f16_of(x: Values) -> Values:
    return np.where(np.isnan(x), _U16(0x7FFF), x.astype(_F16).view(_U16))


def f32_of_f16(x: Values) -> Values:
    return x.view(_F16).astype(_F32)


def packed(high: Values, low: Values) -> Values:
    return (high.astype(_U32) << _U32(16)) | low.astype(_U32)


def _eight_bits(x: Values, mantissa: int, bias: int, largest: int, nan: int) -> Values:
    """Return the codes of float32 in a format of 8 bits, saturated; infinity, too (`satfinite`)."""
    size = np.abs(x)
    bits = size.view(_U32)
    drop = 23 - mantissa
    half = _U32((1 << (drop - 1)) - 1)
    normal = (bits + half + ((bits >> _U32(drop)) & _U32(1))) >> _U32(drop)
    normal = normal - _U32((127 - bias) << mantissa)
    smallest = _F32(2.0 ** (1 - bias))
    subnormal = np.rint(np.minimum(size, smallest) * _F32(2.0 ** (mantissa - 1 + bias)))
    code = np.where(size < smallest, subnormal.astype(_U32), normal)
    code = np.where(bits >= _U32(0x7F800000), _U32(largest), np.minimum(code, _U32(largest)))
    code = code | ((x.view(_U32) >> _U32(24)) & _U32(0x80))
    return np.where(np.isnan(x), _U32(nan), code).astype(_U16)


def e4m3_of(x: Values) -> Values:
    return _eight_bits(x, 3, 7, 0x7E, 0x7F)


def e5m2_of(x: Values) -> Values:
    return _eight_bits(x, 2, 15, 0x7B, 0x7F)


def _half_of_codes(mantissa: int, bias: int) -> Values:
    code = np.arange(256)
    exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
    scaled = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    value = np.ldexp(scaled.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa)
    value = np.minimum(value, float(np.finfo(_F16).max))
    bits = np.where(code & 128, -value, value).astype(_F16).view(_U16)
    if mantissa == 3:
        return np.where((code & 127) == 127, _U16(0x7FFF), bits)
    return np.where((code & 127) >= 124, (code << 8).astype(_U16), bits)


_HALVES = {"e4m3": _half_of_codes(3, 7), "e5m2": _half_of_codes(2, 15)}


def halves_of(kind: str, x: Values) -> Values:
    table = _HALVES[kind]
    return packed(table[x >> _U16(8)], table[x & _U16(255)])

"""The numbers of torch's float8_e4m3fn ("f8e4m3") and float8_e5m2 ("f8e5m2"), as their bits."""

from __future__ import annotations

import math


def float8_bits(value: float, dtype: str) -> int:
    """The number of an 8-bit type that is nearest (ties to even), as its bits; the largest where it
    is too large for the type without infinity."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    size = abs(value)
    if size != size:
        return 0x7F
    largest = 0x7E if dtype == "f8e4m3" else 0x7B
    low = max(k for k in range(largest + 1) if float8_value(k, dtype) <= size)
    if low == largest:
        return sign | (0x7C if dtype == "f8e5m2" and size >= 61440.0 else low)
    below, above = size - float8_value(low, dtype), float8_value(low + 1, dtype) - size
    return sign | (low + (above < below or above == below and low % 2))


def float8_value(bits: int, dtype: str) -> float:
    """The number of an 8-bit type with these bits."""
    mantissa, bias = (3, 7) if dtype == "f8e4m3" else (2, 15)
    size = bits & 0x7F
    exponent, fraction = size >> mantissa, size & ((1 << mantissa) - 1)
    if dtype == "f8e4m3" and size == 0x7F or dtype == "f8e5m2" and size > 0x7C:
        return math.nan
    if dtype == "f8e5m2" and size == 0x7C:
        value = math.inf
    elif exponent:
        value = math.ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
    else:
        value = math.ldexp(fraction, 1 - bias - mantissa)
    return math.copysign(value, -1.0 if bits & 0x80 else 1.0)


__all__ = ["float8_bits", "float8_value"]

"""float8 by the definition of its two formats, in NumPy only.

A value is (-1)^sign 2^(exponent - bias) (1 + mantissa / 2^m), or with the exponent field 0 (-1)^sign 2^(1 - bias)
mantissa / 2^m. e4m3fn: bias 7, m = 3; only the pattern of all ones is NaN, nothing is infinite. e5m2: bias 15, m = 2;
with the exponent field 31 the mantissa 0 is infinity and the others are NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

_FORMATS: Final = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}
_OVERFLOW: Final = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The first pattern that is no finite value: NaN, infinity. What rounds to it overflows."""


def _magnitude(bits: int, dtype: torch.dtype) -> float:
    """The value of a pattern without sign, as if the format had nothing but numbers."""
    _, num_mantissa, bias = _FORMATS[dtype]
    exponent, mantissa = bits >> num_mantissa, bits % 2**num_mantissa
    if exponent == 0:
        return float(2.0 ** (1 - bias) * mantissa / 2**num_mantissa)
    return float(2.0 ** (exponent - bias) * (1 + mantissa / 2**num_mantissa))


def _value(bits: int, dtype: torch.dtype) -> float:
    sign, magnitude = -1.0 if bits & 0x80 else 1.0, bits & 0x7F
    if magnitude > 0x7C if dtype == torch.float8_e5m2 else magnitude == 0x7F:
        return float("nan")
    if dtype == torch.float8_e5m2 and magnitude == 0x7C:
        return sign * float("inf")
    return sign * _magnitude(magnitude, dtype)


_VALUES: Final = {dtype: np.array([_value(bits, dtype) for bits in range(256)], dtype=np.float32) for dtype in _FORMATS}
_MAGNITUDES: Final = {
    dtype: np.array([_magnitude(bits, dtype) for bits in range(_OVERFLOW[dtype] + 1)]) for dtype in _FORMATS
}


def decode(bits: Array, dtype: torch.dtype) -> Array:
    """The values of the patterns, as float32."""
    values: Array = _VALUES[dtype][bits]
    return values


def nearest(values: Array, dtype: torch.dtype) -> Array:
    """The patterns of the nearest values, of two equally near ones that with an even pattern. ``values``: float64."""
    ladder = _MAGNITUDES[dtype]
    size = np.minimum(np.abs(values), ladder[-1])
    above = np.clip(np.searchsorted(ladder, np.where(np.isnan(size), 0, size)), 1, len(ladder) - 1)
    to_low, to_high = size - ladder[above - 1], ladder[above] - size
    up = (to_high < to_low) | ((to_high == to_low) & (above % 2 == 0))
    bits = np.where(up, above, above - 1) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)

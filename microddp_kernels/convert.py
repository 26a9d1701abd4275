"""From what is in memory to the type in which a kernel computes, and back. ``@triton.jit`` functions only.

A *format* tells how the elements behind one pointer are to be read and written:

- ``"native"``: as the pointer's type says.
- ``"bool"``: bytes; computed as zeros and ones.
- ``"bfloat16"``, ``"e4m3fn"``, ``"e5m2"``: the bits of these floats in unsigned integers, converted in integer
  arithmetic, for the interpreter (which truncates where it should round to bfloat16, mistakes its subnormals, and knows
  no float8) and for machines without instructions for float8.
- ``"hardware e4m3fn"``, ``"hardware e5m2"``: the same bits, converted by the instructions of sm_89 and later. These
  saturate, so that what is too large is put right afterwards.

Rounding is to nearest, ties to even. What is too large becomes infinite, or NaN in e4m3fn, which has no infinity.
"""

# mypy: ignore-errors
# (Triton's decorator is untyped, and no annotation describes blocks of values.)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["narrow", "widen"]


@triton.jit
def widen(value, ACC: tl.constexpr, FORMAT: tl.constexpr):
    """``value``, read in ``FORMAT``, exactly in the accumulation type ``ACC``; truth values as 0 and 1."""
    if FORMAT == "native":
        return value.to(ACC)
    elif FORMAT == "bool":
        return (value != 0).to(ACC)
    elif FORMAT == "bfloat16":
        return (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(ACC)
    elif FORMAT == "hardware e4m3fn":
        return value.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(ACC)
    elif FORMAT == "e4m3fn":
        return _widen_e4m3fn(value).to(ACC)
    else:
        # float16 with 8 bits less: one shift does, NaN and subnormals included.
        tl.static_assert(FORMAT == "e5m2" or FORMAT == "hardware e5m2", "unknown format")
        return (value.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(ACC)


@triton.jit
def narrow(value, TYPE: tl.constexpr, FORMAT: tl.constexpr):
    """``value`` rounded to what ``FORMAT`` describes, as elements of the pointer type ``TYPE``."""
    if FORMAT == "native" or FORMAT == "bool":
        return value.to(TYPE)
    else:
        single = value.to(tl.float32)
        if FORMAT == "bfloat16":
            bits = single.to(tl.uint32, bitcast=True)
            rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
            return tl.where(single == single, rounded, 0x7FC0).to(TYPE)
        elif FORMAT == "hardware e4m3fn":
            # 464 is half way from the largest, 448, to what would be the next, and rounds to the even one of the two.
            saturated = single.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            return tl.where(tl.abs(single) > 464.0, 0x7F, saturated).to(TYPE)
        elif FORMAT == "hardware e5m2":
            # 61440 is half way from the largest, 57344, and rounds to the even one, which is infinity.
            saturated = single.to(tl.float8e5).to(tl.uint8, bitcast=True)
            infinity = tl.where(single > 0, 0x7C, 0xFC)
            return tl.where(tl.abs(single) >= 61440.0, infinity, saturated).to(TYPE)
        elif FORMAT == "e4m3fn":
            return _narrow_bits(single, 3, 7, 0x43E80001, 0x7F).to(TYPE)
        else:
            tl.static_assert(FORMAT == "e5m2", "unknown format")
            return _narrow_bits(single, 2, 15, 0x47700000, 0x7C).to(TYPE)


@triton.jit
def _widen_e4m3fn(value):
    """By way of float16, whose exponent has one bit more and a bias greater by 8."""
    bits = value.to(tl.uint16)
    shifted = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    single = shifted.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), single)


@triton.jit
def _narrow_bits(single, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOO_LARGE: tl.constexpr, OVERFLOW: tl.constexpr):
    """The 8 bits of a float32 rounded to a float of ``MANTISSA`` bits and an exponent biased by ``BIAS``.

    From the magnitude ``TOO_LARGE`` on (as bits) it is ``OVERFLOW``, and NaN is 0x7F.
    """
    bits = single.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # A normal result: the carry of the rounding may run into the exponent, as it should.
    SHIFT: tl.constexpr = 23 - MANTISSA
    half = (1 << (SHIFT - 1)) - 1 + ((magnitude >> SHIFT) & 1)
    normal = (magnitude + half - ((127 - BIAS) << 23)) >> SHIFT
    # A subnormal one: in the sum with a number whose last bit counts as much as the result's, the machine rounds.
    ANCHOR: tl.constexpr = 2.0 ** (SHIFT + 1 - BIAS)
    anchored = magnitude.to(tl.float32, bitcast=True) + ANCHOR
    subnormal = anchored.to(tl.uint32, bitcast=True) - ((127 + SHIFT + 1 - BIAS) << 23)
    rounded = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    rounded = tl.where(magnitude >= TOO_LARGE, OVERFLOW, rounded)
    rounded = tl.where(magnitude > 0x7F800000, 0x7F, rounded)
    return sign | rounded.to(tl.uint32)

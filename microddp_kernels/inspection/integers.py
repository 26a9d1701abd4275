"""The integer instructions of PTX on all threads of a program at once.

A value is an array of uint64, one element a thread, of which the low bits count; or None, if it is not known. Only what
addresses and conditions are computed of has to be known, so floats never are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ARITHMETIC",
    "Array",
    "Value",
    "as_signed",
    "compare",
    "convert",
    "funnel_shifted",
    "joined",
    "masked",
    "parted",
    "wide_product",
    "width_of",
]

Array = NDArray[np.uint64]
Value = Array | None

_MASK: Final = (1 << 64) - 1


def width_of(kind: str) -> int:
    """The bits of a type such as ``s32``."""
    return 1 if kind == "pred" else int("".join(each for each in kind if each.isdigit()))


def masked(value: Array, bits: int) -> Array:
    """The low ``bits`` of each element."""
    return value if bits >= 64 else value & np.uint64((1 << bits) - 1)


def as_signed(value: Array, bits: int) -> NDArray[np.int64]:
    """The low ``bits`` of each element as two's complement, in int64."""
    up = np.uint64(64 - bits)
    shifted: NDArray[np.int64] = np.right_shift((value << up).view(np.int64), np.int64(64 - bits))
    return shifted


def _typed(value: Array, kind: str) -> Any:
    """As int64 or uint64, whatever the type says."""
    bits = width_of(kind)
    return as_signed(value, bits) if kind[0] == "s" else masked(value, bits)


def _shift_left(first: Array, second: Array, kind: str) -> Array:
    amount = masked(second, 32)
    shifted: Array = np.where(amount < width_of(kind), first << np.minimum(amount, np.uint64(63)), np.uint64(0))
    return shifted


def _shift_right(first: Array, second: Array, kind: str) -> Array:
    value = _typed(first, kind)
    amount = np.minimum(masked(second, 32), np.uint64(63)).astype(value.dtype)
    shifted: Array = (value >> amount).view(np.uint64)
    return shifted


def _extremum(select: Any) -> Callable[[Array, Array, str], Array]:
    return lambda first, second, kind: select(_typed(first, kind), _typed(second, kind)).view(np.uint64)


def _divided(first: Array, second: Array, kind: str) -> Array:
    return _exactly(_quotient, first, second, kind)


def _remainder(first: Array, second: Array, kind: str) -> Array:
    return _exactly(lambda left, right: left - _quotient(left, right) * right, first, second, kind)


def _high_product(first: Array, second: Array, kind: str) -> Array:
    return _exactly(lambda left, right: (left * right) >> width_of(kind), first, second, kind)


def _quotient(left: int, right: int) -> int:
    """Rounded towards zero, as machines divide; by zero all bits are ones."""
    if right == 0:
        return _MASK
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _exactly(function: Callable[[int, int], int], first: Array, second: Array, kind: str) -> Array:
    """In Python's integers, thread by thread: for what does not fit 64 bits on the way."""
    pairs = zip(_typed(first, kind).tolist(), _typed(second, kind).tolist())
    return np.array([function(left, right) & _MASK for left, right in pairs], dtype=np.uint64)


ARITHMETIC: Final[dict[str, Callable[[Array, Array, str], Array]]] = {
    "add": lambda first, second, kind: first + second,
    "and": lambda first, second, kind: first & second,
    "div": _divided,
    "max": _extremum(np.maximum),
    "min": _extremum(np.minimum),
    "mul.hi": _high_product,
    "mul.lo": lambda first, second, kind: first * second,
    "or": lambda first, second, kind: first | second,
    "rem": _remainder,
    "shl": _shift_left,
    "shr": _shift_right,
    "sub": lambda first, second, kind: first - second,
    "xor": lambda first, second, kind: first ^ second,
}
"""By instruction: a function of two values and the type; bits above the type's width are to be masked off."""

_COMPARISONS: Final[dict[str, Any]] = {
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "hi": np.greater,
    "hs": np.greater_equal,
    "le": np.less_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "lt": np.less,
    "ne": np.not_equal,
}


def compare(relation: str, kind: str, first: Array, second: Array) -> Array:
    """``setp``: 0 or 1 for each thread."""
    result: Array = _COMPARISONS[relation](_typed(first, kind), _typed(second, kind)).astype(np.uint64)
    return result


def convert(value: Array, target: str, source: str) -> Array:
    """``cvt`` between integers."""
    return masked(_typed(value, source).view(np.uint64), width_of(target))


def wide_product(first: Array, second: Array, kind: str) -> Array:
    """``mul.wide``: the whole product, twice as wide as the operands."""
    product: Array = (_typed(first, kind) * _typed(second, kind)).view(np.uint64)
    return product


def joined(parts: list[Array], kind: str) -> Array:
    """``mov`` of a vector to one register: the first part is the lowest."""
    bits = width_of(kind) // len(parts)
    whole = np.zeros_like(parts[0])
    for index, each in enumerate(parts):
        whole |= masked(each, bits) << np.uint64(index * bits)
    return whole


def parted(whole: Array, num_parts: int, kind: str) -> list[Array]:
    """``mov`` of one register to a vector: the inverse of ``joined``."""
    bits = width_of(kind) // num_parts
    return [masked(whole >> np.uint64(index * bits), bits) for index in range(num_parts)]


def funnel_shifted(low: Array, high: Array, amount: Array, direction: str, mode: str) -> Array:
    """``shf``: 32 of the 64 bits of two registers."""
    steps = amount & np.uint64(31) if mode == "wrap" else np.minimum(amount, np.uint64(32))
    pair = high << np.uint64(32) | masked(low, 32)
    return masked(pair << steps >> np.uint64(32) if direction == "l" else pair >> steps, 32)

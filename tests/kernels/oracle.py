"""What combines must give, in NumPy and Python integers only, and tensors with a guard around them.

Values are held as float32, float64, bool or (for integers) Python int arrays, those of complex numbers as their parts
in turn; results are compared as bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.kernels import float8_oracle

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
LEGAL = {
    **dict.fromkeys(("sum", "prod"), (*FLOATS, *FLOATS8, *INTEGERS, *COMPLEX, torch.bool)),
    **dict.fromkeys(("min", "max"), (*FLOATS, *FLOATS8, *INTEGERS, torch.bool)),
    "avg": (*FLOATS, *FLOATS8, *COMPLEX),
    **dict.fromkeys(("band", "bor", "bxor"), (*INTEGERS, torch.bool)),
}
CELLS = [(name, dtype) for name, dtypes in LEGAL.items() for dtype in dtypes]

GUARD_NBYTES = 2048  # more than a block of the launchers under test, so that a missing mask is seen, not fatal
POISON = 0xA5

_SPECIAL_FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.5, 40000.0, 2.0**-24, -(2.0**-149))
_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def unsigned(dtype: torch.dtype) -> Any:
    return np.dtype(f"u{dtype.itemsize}")


def bits_of(tensor: torch.Tensor) -> Array:
    """The bit patterns of a tensor as unsigned integers; of complex numbers those of their parts."""
    dtype = _PARTS.get(tensor.dtype, tensor.dtype)
    bits: Array = tensor.contiguous().view(torch.uint8).numpy().view(unsigned(dtype)).copy()
    return bits


@np.errstate(invalid="ignore")  # signalling NaN
def values_of(tensor: torch.Tensor) -> Array:
    """The exact values of a tensor."""
    bits = bits_of(tensor)
    if tensor.dtype == torch.bfloat16:
        widened: Array = (bits.astype(np.uint32) << 16).view(np.float32)
        return widened
    if tensor.dtype == torch.bool:
        truth: Array = bits != 0
        return truth
    if tensor.dtype in FLOATS8:
        return float8_oracle.decode(bits, tensor.dtype)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        floats: Array = bits.view(_NUMPY[_PARTS.get(tensor.dtype, tensor.dtype)])
        return floats.astype(np.float32) if tensor.dtype == torch.float16 else floats
    return np.array([int(each) for each in tensor.tolist()], dtype=object)


@np.errstate(all="ignore")
def encode(values: Array, dtype: torch.dtype) -> Array:
    """The bit patterns of values rounded to ``dtype``, ties to even; integers wrap around."""
    if dtype == torch.bool:
        return values.astype(np.uint8)
    if dtype == torch.bfloat16:
        return _nearest_bfloat16(values.astype(np.float64))
    if dtype in FLOATS8:
        return float8_oracle.nearest(values.astype(np.float64), dtype)
    dtype = _PARTS.get(dtype, dtype)
    if dtype.is_floating_point:
        return values.astype(_NUMPY[dtype]).view(unsigned(dtype))
    modulus = 1 << (8 * dtype.itemsize)
    return np.array([int(value) % modulus for value in values], dtype=unsigned(dtype))


def _nearest_bfloat16(values: Array) -> Array:
    """The nearer of the two neighbours, found by their distances. ``values`` are float32 values held as float64."""
    below = values.astype(np.float32).view(np.uint32) >> 16
    low = np.abs((below << 16).view(np.float32).astype(np.float64))
    high = np.abs(((below + 1) << 16).view(np.float32).astype(np.float64))
    high = np.where(np.isinf(high), 2.0**128, high)
    to_low, to_high = np.abs(values) - low, high - np.abs(values)
    up = (to_high < to_low) | ((to_high == to_low) & (below & 1 == 1))
    finite = np.isfinite(values)
    return np.where(finite & up, below + 1, np.where(np.isnan(values), 0x7FC0, below)).astype(np.uint16)


def _extreme(first: Array, second: Array, largest: bool) -> Array:
    if first.dtype == object or first.dtype == bool:
        return np.where((first > second) == largest, first, second)
    tie = np.where(np.signbit(first) == largest, second, first)
    chosen = np.where(first == second, tie, np.where((first > second) == largest, first, second))
    return np.where(np.isnan(first) | np.isnan(second), np.array(np.nan, first.dtype), chosen)


def _complex_product(first: Array, second: Array) -> Array:
    """(ar br - ai bi, ar bi + ai br), each operation rounded."""
    product = np.empty_like(first)
    product[0::2] = first[0::2] * second[0::2] - first[1::2] * second[1::2]
    product[1::2] = first[0::2] * second[1::2] + first[1::2] * second[0::2]
    return product


_LOGICAL: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("sum", "max", "bor"), np.logical_or),
    **dict.fromkeys(("prod", "min", "band"), np.logical_and),
    "bxor": np.not_equal,
}
_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda first, second: first + second,
    "avg": lambda first, second: first + second,
    "prod": lambda first, second: first * second,
    "min": lambda first, second: _extreme(first, second, largest=False),
    "max": lambda first, second: _extreme(first, second, largest=True),
    "band": lambda first, second: first & second,
    "bor": lambda first, second: first | second,
    "bxor": lambda first, second: first ^ second,
}


def fold(
    name: str,
    operands: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    weights: Sequence[int] | None = None,
    divisor: int | None = None,
    scale: float | None = None,
) -> Array:
    """The bit patterns of the fold from the left, of operands that are scaled first."""
    values = [values_of(operand) for operand in operands]
    kind = values[0].dtype
    if kind in (np.float32, np.float64):
        is_wide = {torch.float64, torch.complex128} & {out_dtype, *(operand.dtype for operand in operands)}
        kind = np.dtype(np.float64 if is_wide else np.float32)
    step = _LOGICAL[name] if kind == np.bool_ else _VALUES[name]
    if name == "prod" and out_dtype.is_complex:
        step = _complex_product
    with np.errstate(all="ignore"):
        terms = [each.astype(kind) for each in values]
        if scale is not None:
            terms = [term * kind.type(scale) for term in terms]
        if weights is not None:
            terms = [term * kind.type(weight) for term, weight in zip(terms, weights, strict=True)]
            step, divisor = _VALUES["sum"], sum(weights)
        total = terms[0]
        for term in terms[1:]:
            total = step(total, term)
        if divisor is not None:
            total = total / kind.type(divisor)
        return encode(total, out_dtype)


def same(actual: torch.Tensor, expected_bits: Array) -> None:
    """Asserts equal bits; where both are NaN the payload is free."""
    actual_bits = bits_of(actual)
    wrong = actual_bits != expected_bits
    if actual.dtype.is_floating_point or actual.dtype.is_complex:
        expected = torch.from_numpy(expected_bits.view(np.uint8)).view(actual.dtype)
        wrong &= ~(np.isnan(values_of(actual)) & np.isnan(values_of(expected)))
    where = np.flatnonzero(wrong)[:5]
    assert not where.size, f"{wrong.sum()} wrong: at {where} {actual_bits[where]} instead of {expected_bits[where]}"


def sample(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Random bit patterns (every class of value: NaN, subnormals, extremes), or truth values."""
    random = np.random.default_rng(seed)
    pattern = random.integers(0, 2 if dtype == torch.bool else 256, numel * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pattern).view(dtype) if numel else torch.empty(0, dtype=dtype)


def special_pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every ordered pair of the type's special values."""
    if dtype == torch.bool:
        values = torch.tensor([False, True])
    elif dtype.is_complex:
        parts = [1.0, -0.0, -1.5, float("nan"), float("inf"), 3e38]
        values = torch.tensor([complex(real, imag) for real in parts for imag in parts], dtype=dtype)
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        values = torch.tensor([*_SPECIAL_FLOATS, info.max, info.min, info.tiny, info.smallest_normal / 4], dtype=dtype)
    else:
        limits = torch.iinfo(dtype)
        values = torch.tensor(
            [0, 1, 2, 3, 100, 120, limits.max, limits.min, limits.max - 1, limits.max // 2 + 1], dtype=dtype
        )
    count = values.numel()
    first, second = np.divmod(np.arange(count * count), count)  # torch repeats no unsigned integers
    return values[torch.from_numpy(first)], values[torch.from_numpy(second)]


@dataclass(frozen=True)
class Guarded:
    """A tensor inside poisoned memory, itself poisoned at first."""

    whole: torch.Tensor
    tensor: torch.Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, numel: int) -> Guarded:
        nbytes = numel * dtype.itemsize
        whole = torch.full((nbytes + 2 * GUARD_NBYTES,), POISON, dtype=torch.uint8)
        return cls(whole, whole[GUARD_NBYTES : GUARD_NBYTES + nbytes].view(dtype))

    @classmethod
    def holding(cls, values: torch.Tensor) -> Guarded:
        made = cls.make(values.dtype, values.numel())
        made.tensor.copy_(values)
        return made

    def check(self) -> None:
        guard = torch.cat([self.whole[:GUARD_NBYTES], self.whole[-GUARD_NBYTES:]])
        assert bool((guard == POISON).all()), "memory around the tensor was written"

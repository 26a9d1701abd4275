"""In which order contributions are folded, and what comes of it bit for bit, in NumPy only.

Values are arrays of shape (parts, numel): one part, or the real and the imaginary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = [
    "Array",
    "Fold",
    "Order",
    "accumulation_of",
    "around_the_ring",
    "as_they_arrive",
    "combined",
    "in_rank_order",
    "parts_of",
    "rounded",
    "unlike",
    "up_the_tree",
]

Array = np.ndarray[Any, np.dtype[Any]]

Order: TypeAlias = "int | tuple[Order, ...]"
"""A rank for what it contributes; a tuple is a fold from the left, rounded to the type that travels. A tuple of one is
a contribution converted to that type, since it travels."""


def in_rank_order(rank: int, world_size: int) -> list[Order]:
    """One fold of all contributions, each of which is converted first."""
    return [tuple((each,) for each in range(world_size))]


def up_the_tree(rank: int, world_size: int) -> list[Order]:
    """Every node folds its own value and those of its children, the left one first."""

    def below(node: int) -> Order:
        return (node, *(below(child) for child in (2 * node + 1, 2 * node + 2) if child < world_size))

    return [below(0)]


def around_the_ring(rank: int, world_size: int) -> list[Order]:
    """From any rank to the right; which chunk starts where is left open."""
    return [_from_rank_to_rank(first, world_size) for first in range(world_size)]


def as_they_arrive(rank: int, world_size: int) -> list[Order]:
    """A rank's own value, then its left neighbour's, and so on."""
    order: Order = rank
    for hop in range(1, world_size):
        order = (order, ((rank - hop) % world_size,))
    return [order]


def _from_rank_to_rank(first: int, world_size: int) -> Order:
    order: Order = (first,)
    for hop in range(1, world_size):
        order = (order, (first + hop) % world_size)
    return order


@dataclass(frozen=True)
class Fold:
    """How the contributions of floats or complex numbers become a result.

    Attributes:
        op: the operator.
        travels: the type to which every partial result is rounded.
        means: partial results travel as means of what they cover, else sums that are divided at the end.
        contributions: of each rank, in the wider of the data's and that type's accumulation types.
    """

    op: str
    travels: torch.dtype
    means: bool
    contributions: Sequence[Array]

    def run(self, order: Order) -> Array:
        """The result: values of the type that travels."""
        with np.errstate(all="ignore"):
            return self._run(order)[0]

    def _run(self, order: Order) -> tuple[Array, int]:
        """A value and how many contributions it covers."""
        if isinstance(order, int):
            return self.contributions[order], 1
        operands = [self._run(each) for each in order]
        covered = sum(count for _, count in operands)
        if len(order) > 1 and not any(isinstance(each, int) for each in order):  # all of them have travelled
            operands = [(values.astype(accumulation_of(self.travels)), count) for values, count in operands]
        if self.op == "avg" and self.means and len(operands) > 1:
            terms = [values * values.dtype.type(count) for values, count in operands]
        else:
            terms = [values for values, _ in operands]
        total = terms[0]
        for each in terms[1:]:
            total = combined(self.op, total, each)
        is_divided = len(operands) > 1 if self.means else covered == len(self.contributions)
        if self.op == "avg" and is_divided:
            total = total / total.dtype.type(covered)
        return rounded(total, self.travels), covered


def accumulation_of(dtype: torch.dtype) -> np.dtype[Any]:
    """The type in which numbers of a dtype are folded, or their parts."""
    return np.dtype(np.float64 if dtype in (torch.float64, torch.complex128) else np.float32)


def combined(op: str, first: Array, second: Array) -> Array:
    """Two values, each operation rounded to their type."""
    if op in ("min", "max"):
        return _extreme(op, first, second)
    if op in ("sum", "avg"):
        return first + second
    if len(first) == 1:
        return first * second
    (real, imag), (other_real, other_imag) = first, second
    return np.stack([real * other_real - imag * other_imag, real * other_imag + imag * other_real])


def _extreme(op: str, first: Array, second: Array) -> Array:
    """IEEE 754's minimum and maximum: NaN if there is one, -0.0 below 0.0."""
    found: Array = (np.minimum if op == "min" else np.maximum)(first, second)
    signs = np.signbit(first), np.signbit(second)
    is_negative = signs[0] | signs[1] if op == "min" else signs[0] & signs[1]
    zeros = (first == 0) & (second == 0)
    return np.where(zeros, np.where(is_negative, found.dtype.type(-0.0), found.dtype.type(0.0)), found)


def rounded(values: Array, dtype: torch.dtype) -> Array:
    """``values`` to the nearest of ``dtype``, ties to even, held as they were.

    What is too large becomes infinite; in float8_e4m3fn, which has no infinity, NaN.
    """
    if dtype in (torch.float64, torch.complex128) or (dtype.itemsize >= 4 and values.dtype == np.float32):
        return values
    if dtype in (torch.float32, torch.complex64):
        return values.astype(np.float32).astype(values.dtype)
    info = torch.finfo(dtype)
    exact = values.astype(np.float64)
    exponent = np.maximum(np.frexp(exact)[1] - 1, np.frexp(info.smallest_normal)[1] - 1)
    unit = np.ldexp(info.eps, exponent)
    nearest = np.rint(exact / unit) * unit
    beyond = np.nan if dtype == torch.float8_e4m3fn else np.copysign(np.inf, nearest)
    found: Array = np.where(np.abs(nearest) > info.max, beyond, nearest).astype(values.dtype)
    return found


def parts_of(tensor: torch.Tensor) -> Array:
    """The exact values of floats or complex numbers, in float64."""
    parts = torch.view_as_real(tensor).movedim(-1, 0) if tensor.is_complex() else tensor.unsqueeze(0)
    found: Array = parts.double().numpy()
    return found


def unlike(actual: Array, expected: Array) -> Array:
    """True where values differ, or signs of zero, and are not both NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    differ: Array = ((actual != expected) | (np.signbit(actual) != np.signbit(expected))) & ~both_nan
    return differ

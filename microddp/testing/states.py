"""Operands as tuples of lanes, and their values as NumPy columns.

A *state* is what one rank could contribute: one element of every lane, or one row of a wide lane. ``Lanes`` hold many
states, one a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from microddp_kernels.launchers.checks import widths_of
from microddp_kernels.reduce_op import ReduceOp, Values

__all__ = [
    "WITHOUT_INFINITY",
    "Array",
    "Lanes",
    "as_values",
    "bytes_of",
    "column",
    "convert",
    "describe",
    "difficulty",
    "is_float",
    "joined",
    "num_rows",
    "take",
]

Array = np.ndarray[Any, np.dtype[Any]]
Lanes = tuple[torch.Tensor, ...]

WITHOUT_INFINITY: Final = frozenset({torch.float8_e4m3fn})
_NAN_BYTE: Final = 0x7F


def as_values(op: ReduceOp, lanes: Lanes) -> Values:
    """The lanes as launchers take them: a tensor if the operator has one lane."""
    return lanes if op.lanes else lanes[0]


def num_rows(op: ReduceOp, lanes: Lanes) -> int:
    """How many states there are."""
    return lanes[0].numel() // widths_of(op, as_values(op, lanes))[0]


def is_float(dtype: torch.dtype) -> bool:
    """Whether elements are floats, or pairs of them."""
    return dtype.is_floating_point or dtype.is_complex


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, of shape (numel, bytes of an element): torch cannot compare or index every type."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.dtype.itemsize)


def take(op: ReduceOp, lanes: Lanes, rows: Array) -> Lanes:
    """The states at ``rows``, in that order."""
    count = num_rows(op, lanes)
    index = torch.from_numpy(rows)
    return tuple(bytes_of(tensor).view(count, -1)[index].reshape(-1).view(tensor.dtype) for tensor in lanes)


def joined(parts: Sequence[Lanes]) -> Lanes:
    """The states of all parts, one after another."""
    return tuple(torch.cat([part[lane] for part in parts]) for lane in range(len(parts[0])))


def convert(lanes: Lanes, dtypes: Iterable[torch.dtype]) -> Lanes:
    """The lanes in other types, rounded to nearest; what is too large for a type without infinity is NaN."""
    return tuple(_converted(tensor, dtype) for tensor, dtype in zip(lanes, dtypes))


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = tensor.to(dtype)
    if dtype in WITHOUT_INFINITY and tensor.dtype != dtype:  # torch saturates
        largest = torch.finfo(dtype).max
        unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
        bytes_of(made)[tensor.to(torch.float64).abs() > largest + unit / 2] = _NAN_BYTE
    return made


def column(tensor: torch.Tensor, rows: int) -> Array:
    """The values, exact, of shape (rows, width): floats as float64, complex numbers as pairs, others as they are."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.to(torch.complex128))
    elif tensor.dtype.is_floating_point:
        tensor = tensor.to(torch.float64)
    elif tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    values: Array = tensor.numpy().reshape(rows, -1)
    return values


def difficulty(op: ReduceOp, operands: Sequence[Lanes]) -> Array:
    """One figure a row that is small where the values of all operands are simple to read: few bits, near 1, finite."""
    count = num_rows(op, operands[0])
    total = np.zeros(count)
    for tensor in (tensor for lanes in operands for tensor in lanes):
        values = column(tensor, count).astype(np.float64)
        finite = np.isfinite(values)
        fraction, exponent = np.frexp(np.where(finite, values, 0.0))
        scaled = np.abs(fraction) * 2.0**53
        low_bit = np.bitwise_and(scaled.astype(np.int64), -scaled.astype(np.int64))
        num_bits = np.where(scaled > 0, 53 - np.log2(np.maximum(low_bit, 1)), 0)
        cost = 2 * num_bits + np.abs(exponent) + np.where(values == 0, 4, 1) * np.signbit(values)
        total += np.where(finite, cost, 1e4).sum(axis=1)
    return total


def describe(op: ReduceOp, lanes: Lanes, row: int) -> tuple[str, ...]:
    """The values of each lane of one state."""
    count = num_rows(op, lanes)
    return tuple(_describe_one(tensor.view(count, -1)[row]) for tensor in lanes)


def _describe_one(elements: torch.Tensor) -> str:
    wide = elements.to(torch.float64) if elements.dtype.is_floating_point else elements
    short = elements.numpy() if elements.dtype == torch.float32 else wide.numpy()
    texts = [str(each) for each in short]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"

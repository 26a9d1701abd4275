"""What a collective must leave, computed with NumPy in float64 or exact integers: none of the library takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

__all__ = ["FOLDED", "Expected", "expected_result", "fold"]

_FOLDS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
FOLDED: Final = tuple(_FOLDS)
"""The operators of which the right result is known here."""

_ROUNDINGS: Final = 8
"""Partial results are rounded at each hop; relative to the sum of all magnitudes, they stay within a few roundings."""


def fold(op: str, rows: Sequence[Any], dtype: torch.dtype) -> Any:
    """``op`` over the rows, as a NumPy array: int64 that wraps into ``dtype``, bool, or float64.

    Args:
        op: the name of a built-in operator.
        rows: one NumPy array for each rank: float64, int64 or bool.
        dtype: the tensors' element type.
    """
    combine = _FOLDS[op]
    if dtype == torch.bool and op in ("sum", "prod"):
        combine = np.logical_or if op == "sum" else np.logical_and
    total = rows[0].copy()
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            total = combine(total, row)
        if op == "avg":
            total = total / len(rows)
    if dtype.is_floating_point or dtype == torch.bool:
        return total
    return total.astype(str(dtype).removeprefix("torch.")).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Expected:
    """What one rank must end with: exact, and the size of what was added up to it, which bounds the roundings."""

    values: torch.Tensor
    magnitude: torch.Tensor

    def mismatch(self, result: torch.Tensor, start: int, stop: int) -> str | None:
        """Where elements [start, stop) of ``result`` are not right; None if they are.

        Integers must be equal. Floats may be off by a few roundings of the magnitude, or overflow where it does.
        """
        got, want = result[start:stop], self.values[start:stop]
        if got.dtype.is_floating_point:
            wide, size = want.to(torch.float64), self.magnitude[start:stop].to(torch.float64).abs()
            limits = torch.finfo(got.dtype)
            off = (got.to(torch.float64) - wide).abs()
            same = (got == want.to(got.dtype)) | (got.isnan() & want.isnan())
            wrong = ~(same | (off <= _ROUNDINGS * limits.eps * size + limits.tiny) | (size > limits.max))
        else:
            wrong = got.to(want.dtype) != want
        if not bool(wrong.any()):
            return None
        place = int(wrong.nonzero()[0])
        return f"element {start + place} is {got[place].item()}, not {want[place].item()}"


def expected_result(collective: str, rank: int, rows: Sequence[torch.Tensor], op: str, root: int) -> Expected | None:
    """What ``rank`` must end with, over the whole tensor; None where it holds no result, or the operator is not known.

    Args:
        collective: all_reduce, reduce_scatter, all_gather, broadcast or reduce.
        rank: whose result.
        rows: what each rank started with.
        op: the operator's name.
        root: of a broadcast or reduce.
    """
    if collective in ("all_gather", "broadcast"):
        values = torch.cat(list(rows)) if collective == "all_gather" else rows[root]
        return Expected(values, torch.zeros(values.numel()))
    if op not in _FOLDS or (collective == "reduce" and rank != root):
        return None
    dtype = rows[0].dtype
    exact = torch.float64 if dtype.is_floating_point else torch.bool if dtype == torch.bool else torch.int64
    arrays = [row.to(exact).numpy() for row in rows]
    values = torch.from_numpy(fold(op, arrays, dtype))
    if op not in ("sum", "avg") or not dtype.is_floating_point:
        return Expected(values, values)
    return Expected(values, torch.from_numpy(fold("sum", [abs(each) for each in arrays], dtype)))

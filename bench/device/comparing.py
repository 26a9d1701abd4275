"""Operands for kernels, and whether two results are the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from microddp.testing.samples import default_values
from microddp_kernels.dtypes import BITS_OF
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["INEXACT", "WIDTH", "difference", "states"]

INEXACT: Final = frozenset({"logaddexp", "logsumexp", "softmax_merge"})
"""Their exponentials have no one right rounding, so that launchers may differ in the last bits."""

_ROUNDINGS: Final = 16
WIDTH: Final = 48
"""Elements of a row of a wide lane."""


def states(op: ReduceOp, dtypes: Sequence[torch.dtype], numel: int, seed: int) -> tuple[torch.Tensor, ...]:
    """One operand: ``numel`` states, a tensor a lane. All classes of value where results are exact."""
    random = np.random.default_rng(seed)
    if op.name in INEXACT or op.name == "welford":
        return tuple(_moderate(random, op, lane, dtype, numel) for lane, dtype in enumerate(dtypes))
    return tuple(default_values(random, numel, dtype) for dtype in dtypes)


def _moderate(random: np.random.Generator, op: ReduceOp, lane: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Valid states: sums and squared deviations are positive, counts whole; a few states are empty."""
    name = op.lanes[lane].name if op.lanes else "value"
    count = numel * (WIDTH if op.lanes and op.lanes[lane].wide else 1)
    if name == "count":
        values = random.integers(0, 1000, count).astype(np.float64)
    elif name in ("sum", "m2"):
        values = random.uniform(0.5, 8.0, count)
    else:
        values = random.standard_normal(count) * 4
        if name == "max":
            values[:: max(count // 7, 2)] = -np.inf
    return torch.from_numpy(values).to(dtype)


def difference(found: torch.Tensor, want: torch.Tensor, computed_in: torch.dtype | None) -> str:
    """Where two tensors differ, or "". NaN equals NaN, whatever its payload.

    Args:
        computed_in: None: every bit counts. A float type: a few of its roundings, and one of the stored type, are
            allowed, as for ``INEXACT`` operators.
    """
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"{found.dtype}{list(found.shape)} instead of {want.dtype}{list(want.shape)}"
    parts = [torch.view_as_real(each).flatten() if each.is_complex() else each.flatten() for each in (found, want)]
    one, two = parts
    bits = BITS_OF[one.dtype.itemsize]
    wrong = one.view(bits) != two.view(bits)
    if one.dtype.is_floating_point:
        left, right = (each.to(torch.float64) for each in parts)
        wrong &= ~(left.isnan() & right.isnan())
        if computed_in is not None:
            wrong &= ~_is_near(left, right, one.dtype, computed_in)
    if not bool(wrong.any()):
        return ""
    place = int(wrong.nonzero()[0])
    got, wanted = (each[place : place + 1] for each in parts)
    return f"{int(wrong.sum())} of {wrong.numel()} differ: [{place}] is {_shown(got)}, not {_shown(wanted)}"


def _shown(one: torch.Tensor) -> str:
    return str(one.to(torch.float64).item() if one.dtype.is_floating_point else one.item())


def _is_near(left: torch.Tensor, right: torch.Tensor, stored: torch.dtype, computed_in: torch.dtype) -> torch.Tensor:
    allowed = _ROUNDINGS * torch.finfo(computed_in).eps
    if stored != computed_in:
        allowed += 2 * torch.finfo(stored).eps
    largest = torch.maximum(left.abs(), right.abs()).clamp(min=1.0)
    return (left - right).abs() <= allowed * largest

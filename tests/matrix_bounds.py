"""How far from the exact result a cell of floats or complex numbers may end: bounds from the theory of rounding."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import torch

from tests.matrix import FLOATS8, NARROW, Cell, Row
from tests.matrix_folds import Array, accumulation_of, combined, rounded, unlike

__all__ = ["too_far"]


def too_far(cell: Cell, row: Row, parts: Array, actual: Array) -> Array:
    """True for each element that no chain of roundings explains.

    Args:
        parts: the contributions, (ranks, parts, numel).
        actual: the result, (parts, numel).
    """
    with np.errstate(all="ignore"):
        if cell.op in ("min", "max"):
            return _off_extreme(cell, parts, actual)
        wide = parts.astype(np.longdouble)
        exact = reduce(lambda first, second: combined(cell.op, first, second), wide)
        exact = exact / len(parts) if cell.op == "avg" else exact
        far = _beyond_bound(cell, row, wide, exact, actual)
        if cell.wire is None and cell.dtype not in FLOATS8 and len(exact) == 1:
            far |= ~np.isfinite(exact) & unlike(actual, exact)
        if cell.op != "prod":
            all_negative_zero = (np.signbit(parts) & (parts == 0)).all(axis=0)
            far |= all_negative_zero & ~(np.signbit(actual) & (actual == 0))
    return far


def _off_extreme(cell: Cell, parts: Array, actual: Array) -> Array:
    """Rounding keeps the order, so the extreme is rounded as if it alone had travelled."""
    extreme = reduce(lambda first, second: combined(cell.op, first, second), parts)
    if cell.wire is None:
        return unlike(actual, extreme)
    can_travel = np.isfinite(rounded(parts, cell.wire)).all(axis=0)
    wrong: Array = can_travel & unlike(actual, rounded(rounded(extreme, cell.wire), cell.dtype))
    return wrong


def _beyond_bound(cell: Cell, row: Row, parts: Array, exact: Array, actual: Array) -> Array:
    """Off by more than every rounding on the way can add up to; where nothing can overflow on the way."""
    world_size = len(parts)
    magnitudes = np.sqrt((parts**2).sum(axis=1, keepdims=True)) if cell.op == "prod" else np.abs(parts)
    if cell.op == "prod":
        scale, largest = np.prod(magnitudes, axis=0), np.prod(np.maximum(magnitudes, 1), axis=0)
    else:
        scale = largest = magnitudes.sum(axis=0)
    growth = _growth(cell, row, world_size)
    bound = growth * scale / (world_size if cell.op == "avg" else 1)
    if cell.op != "prod":  # whose values are chosen so that no partial result is subnormal
        bound = bound + (1 + growth) * 2 * world_size * _smallest(cell.travels) / 2 + _smallest(cell.dtype)
    top = min(torch.finfo(cell.dtype).max, torch.finfo(cell.travels).max)
    is_safe = np.isfinite(parts).all(axis=(0, 1)) & (largest * (1 + growth) <= top)
    beyond: Array = is_safe & ~(np.abs(actual - exact) <= bound)
    return beyond


def _growth(cell: Cell, row: Row, world_size: int) -> float:
    """The relative error that the roundings of a longest way add up to, (1 + u)(1 + u) … - 1."""
    wide = float(np.finfo(accumulation_of(cell.travels)).eps) / 2
    travels, data = torch.finfo(cell.travels).eps / 2, torch.finfo(cell.dtype).eps / 2
    hops, additions = row.roundings(world_size), row.additions(world_size)
    conversions = 0 if cell.wire is None else 1
    if cell.op == "prod":  # every factor's error counts, not those of one way
        conversions *= world_size
        hops, additions = 1 if row.rank_order else world_size - 1, world_size - 1
        wide *= math.sqrt(5) if cell.dtype.is_complex else 1  # of a complex product's operations together
    if cell.op == "avg":
        additions = 4 * additions + 1  # two products, a sum and a quotient for each weighted mean
    is_narrowed = cell.travels in NARROW or cell.travels.itemsize < cell.dtype.itemsize
    travelled = (conversions + hops) * is_narrowed
    roundings = [
        (travels, travelled),
        (wide, additions),
        (data, int(cell.wire is not None)),
        (float(np.finfo(np.longdouble).eps), 4 * world_size),  # of the exact result itself
    ]
    return math.expm1(sum(count * math.log1p(unit) for unit, count in roundings))


def _smallest(dtype: torch.dtype) -> float:
    """The distance between subnormal numbers."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps

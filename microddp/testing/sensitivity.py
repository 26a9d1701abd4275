"""How much results depend on rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import numpy as np

from microddp.testing.case import Case
from microddp.testing.compare import magnitude, perturbed
from microddp.testing.states import Array, Lanes

__all__ = ["MARGIN", "spread_apart", "spread_of"]

MARGIN: Final = 8.0
"""How many times the spread a difference may be to be put down to rounding."""

_SEEDS: Final = (1, 2, 3, 4, 5)
_CALLS: Final = 16
_FACTOR: Final = 1024.0

Touch = Callable[[Lanes], Lanes]


def spread_of(
    case: Case, results: Sequence[Lanes], evaluate: Callable[[Touch], Sequence[Lanes]], noise: float
) -> dict[int, Array]:
    """For each float lane, how far relative errors of ``noise`` move the results.

    ``evaluate(touch)`` computes the results again, with ``touch`` applied to all that it combines. Of several random
    errors the one that moves a result the least counts: an ill-conditioned result is moved by all of them, one that is
    near a threshold of the operator only by some.
    """
    distances = _distances(case, results, evaluate, lambda seed: lambda lanes: perturbed(lanes, noise, seed))
    return {lane: each.min(axis=0) for lane, each in distances.items()}


def spread_apart(
    case: Case, results: Sequence[Lanes], evaluate: Callable[[Touch], Sequence[Lanes]], noise: float
) -> dict[int, Array]:
    """The same with errors that tell equal operands apart: what they cancel of each other is not exact.

    It shows in a product of a state by itself, say. But then an operator that compares its operands takes another one
    of two equal ones, and the results are apart by as much as what comes with these. That does not get larger
    with the errors, as rounding does: only where the spread (the median) grows with them is it counted.
    """

    def touch(seed: int, size: float) -> Touch:
        calls = count(seed * _CALLS)
        return lambda lanes: perturbed(lanes, size, next(calls))

    spreads = []
    for size in (noise, noise * _FACTOR):
        distances = _distances(case, results, evaluate, lambda seed, size=size: touch(seed, size))  # type: ignore[misc]
        spreads.append({lane: np.median(each, axis=0) for lane, each in distances.items()})
    small, large = spreads
    return {lane: np.where(large[lane] > small[lane] * _FACTOR**0.5, small[lane], 0.0) for lane in small}


def _distances(
    case: Case,
    results: Sequence[Lanes],
    evaluate: Callable[[Touch], Sequence[Lanes]],
    touch_of: Callable[[int], Touch],
) -> dict[int, Array]:
    """For each float lane, by seed: how far the results are from those of touched operands."""
    found: dict[int, list[Array]] = {lane: [] for lane in case.float_lanes}
    for seed in _SEEDS:
        moved = evaluate(touch_of(seed))
        for lane in case.float_lanes:
            pairs = zip(case.columns(results, lane), case.columns(moved, lane))
            found[lane].append(magnitude([_distance(one, two) for one, two in pairs]))
    return {lane: np.stack(each) for lane, each in found.items()}


def _distance(one: Array, two: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Array = np.abs(one - two)
    return distance

"""How much results depend on rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from microddp.testing.case import Case
from microddp.testing.compare import magnitude, perturbed
from microddp.testing.states import Array, Lanes

__all__ = ["MARGIN", "spread_of"]

MARGIN: Final = 8.0
"""How many times the spread a difference may be to be put down to rounding."""

_SEEDS: Final = (1, 2, 3)

Touch = Callable[[Lanes], Lanes]


def spread_of(
    case: Case, results: Sequence[Lanes], evaluate: Callable[[Touch], Sequence[Lanes]], noise: float
) -> dict[int, Array]:
    """For each float lane, how far relative errors of ``noise`` move the results.

    ``evaluate(touch)`` computes the results again, with ``touch`` applied to all that it combines. Of several random
    errors the one that moves a result the least counts: an ill-conditioned result is moved by all of them, one that is
    near a threshold of the operator only by some.
    """
    found: dict[int, Array] = {}
    for seed in _SEEDS:
        moved = evaluate(lambda lanes, seed=seed: perturbed(lanes, noise, seed))  # type: ignore[misc]
        for lane in case.float_lanes:
            pairs = zip(case.columns(results, lane), case.columns(moved, lane))
            distance = magnitude([_distance(one, two) for one, two in pairs])
            found[lane] = np.minimum(found[lane], distance) if lane in found else distance
    return found


def _distance(one: Array, two: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Array = np.abs(one - two)
    return distance

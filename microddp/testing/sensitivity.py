"""How much results depend on rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from microddp.testing.case import Case
from microddp.testing.compare import perturbed
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

    ``evaluate(touch)`` computes the results again, with ``touch`` applied to all that it combines.
    """
    found: dict[int, Array] = {}
    for seed in _SEEDS:
        moved = evaluate(lambda lanes, seed=seed: perturbed(lanes, noise, seed))  # type: ignore[misc]
        for lane in case.float_lanes:
            for one, two in zip(case.columns(results, lane), case.columns(moved, lane)):
                with np.errstate(invalid="ignore"):
                    distance = np.abs(one - two)
                distance = np.where(np.isfinite(distance), distance, 0.0)
                found[lane] = np.maximum(found[lane], distance) if lane in found else distance
    return found

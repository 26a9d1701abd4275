"""That a stored result is what float64 gives, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from microddp.testing.case import Case
from microddp.testing.compare import half_ulp, limited, magnitude, ulp
from microddp.testing.sensitivity import MARGIN, spread_apart, spread_of
from microddp.testing.states import Array, Lanes, convert, is_float, take

__all__ = ["check_rounding"]

_ROUNDINGS: Final = 8.0
"""Units in the last place of the accumulation type that a combine function of a few operations may lose."""


_NOISE: Final = 16.0
"""Units in the last place by which operands are moved, to see how much a result depends on them."""


@dataclass(frozen=True)
class _Comparison:
    """What was stored beside the same in float64, and the operands of both."""

    operands: Sequence[Lanes]
    stored: Lanes
    exact: Lanes

    def at(self, case: Case, rows: Array) -> _Comparison:
        few = [take(case.op, lanes, rows) for lanes in (*self.operands, self.stored, self.exact)]
        return _Comparison(few[:-2], few[-2], few[-1])


def check_rounding(
    case: Case, text: str, num_operands: int, divisor: int | None, scale: float | None, stored: Lanes
) -> None:
    """Raises OperatorError unless ``stored`` is the same computed in float64, within half a unit of the element type.

    To that comes what a few roundings in the accumulation type lose, at the largest value involved, or as much more as
    the result depends on small errors of the operands.
    """
    if case.law_dtypes == case.dtypes or not case.is_widened or not case.settings.rounds_once:
        return

    def compute(operands: Sequence[Lanes]) -> Lanes:
        return case.combine_widened(case.widened(operands), divisor, scale)

    operands = case.operands[:num_operands]
    whole = _Comparison(operands, stored, compute(operands))
    failing = _differs(case, whole, {})
    num_failing = int(failing.sum())
    if num_failing:
        failing &= ~_leaves_the_range(case, whole)
        rows = np.flatnonzero(failing)
        few = whole.at(case, rows)
        failing[rows] = _differs(case, few, _spread(case, few, compute)) if len(rows) else False
    name = case.runners[0].name
    results = [(f"{name}: {text}", stored), ("in float64", whole.exact)]
    complaint = f"does not give what float64 gives, rounded once, on {text}"
    case.require("rounded once", complaint, name, operands, results, failing, num_failing - int(failing.sum()))


def _spread(case: Case, few: _Comparison, compute: Callable[[Sequence[Lanes]], Lanes]) -> dict[int, Array]:
    noise = _NOISE * torch.finfo(case.coarsest).eps
    operands = case.widened(few.operands)

    def evaluate(touch: Callable[[Lanes], Lanes]) -> list[Lanes]:
        return [compute([touch(lanes) for lanes in operands])]

    together, apart = (measure(case, [few.exact], evaluate, noise) for measure in (spread_of, spread_apart))
    return {lane: np.maximum(together[lane], apart[lane]) for lane in together}


def _differs(case: Case, given: _Comparison, spread: dict[int, Array]) -> Array:
    """Which rows differ by more than the roundings allowed, and ``spread``."""
    failing: Array = np.zeros(len(case.columns([given.stored], 0)[0]), dtype=bool)
    for lane, dtype in enumerate(case.dtypes):
        if is_float(dtype):
            failing |= _lane_differs(case, lane, given, MARGIN * spread[lane] if spread else 0.0)
        else:
            (found,) = case.columns([given.stored], lane)
            (expected,) = case.columns([convert(given.exact, case.dtypes)], lane)
            failing |= (found != expected).any(axis=1)
    return failing


def _lane_differs(case: Case, lane: int, given: _Comparison, more: Array | float) -> Array:
    dtype, accumulation = case.dtypes[lane], case.accumulation[lane]
    stored, exact = case.columns((given.stored, given.exact), lane)
    with np.errstate(invalid="ignore", over="ignore"):
        stored, exact = limited(stored, exact, dtype)
    scale = magnitude([exact, *case.columns(given.operands, lane)])
    tolerance = _ROUNDINGS * max(1.0, case.settings.max_ulps or 0.0) * ulp(scale, case.coarsest) + more
    if dtype != accumulation:
        tolerance = tolerance + half_ulp(magnitude([exact]), dtype)
    same = (stored == exact) | np.isnan(stored) & np.isnan(exact)
    with np.errstate(invalid="ignore"):
        same |= np.abs(stored - exact) <= tolerance
    if case.settings.zero_signs is not False:
        same &= (stored != 0) | (exact != 0) | (np.signbit(stored) == np.signbit(exact))
    failing: Array = np.logical_not(same.all(axis=1))
    return failing


def _leaves_the_range(case: Case, given: _Comparison) -> Array:
    """Rows whose values are so large (or small) that their products overflow (or vanish) before they are stored."""
    count = len(case.columns([given.stored], 0)[0])
    is_large: Array = np.zeros(count, dtype=bool)
    is_small: Array = np.zeros(count, dtype=bool)
    is_lost: Array = np.zeros(count, dtype=bool)
    for lane in case.float_lanes:
        info = torch.finfo(case.accumulation[lane])
        highest, lowest = info.max**0.5 / 16, info.smallest_normal**0.5 * 16
        for values in case.columns(given.operands, lane):
            sizes = np.abs(np.where(np.isfinite(values), values, 0.0))
            is_large |= (sizes > highest).any(axis=1)
            is_small |= ((sizes > 0) & (sizes < lowest)).any(axis=1)
    for lane in case.float_lanes:
        lowest = torch.finfo(case.accumulation[lane]).smallest_normal ** 0.5 * 16
        stored, exact = case.columns((given.stored, given.exact), lane)
        overflows = ~np.isfinite(stored)
        vanishes = (np.abs(exact) < lowest) & (np.abs(stored) < lowest)
        is_lost |= (overflows & is_large[:, None] | vanishes & is_small[:, None]).any(axis=1)
    return is_lost

"""That launchers agree with each other, with a computation in float64, and with themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from microddp.testing.case import Case
from microddp.testing.compare import differs, half_ulp, magnitude, ulp
from microddp.testing.rounding import check_rounding
from microddp.testing.runners import Runner
from microddp.testing.states import Array, Lanes, convert, is_float

__all__ = ["check_agreement"]

_WORLD_SIZE: Final = 3
_OTHER_WORLD_SIZES: Final = (2, 5, 8)


@dataclass(frozen=True)
class _Trial:
    """Something that every launcher computes."""

    text: str
    num_operands: int
    divisor: int | None = None
    scale: float | None = None

    def run(self, case: Case, runner: Runner) -> Lanes:
        operands = case.operands[: self.num_operands]
        return runner.combine(case.op, operands, divisor=self.divisor, scale=self.scale)


_PAIR: Final = _Trial("a ∘ b", 2)
_TRIPLE: Final = _Trial("(a ∘ b) ∘ c", 3)
_FOLD: Final = _Trial("((a ∘ b) ∘ c) ∘ d", 4)
_FINISHED: Final = _Trial(f"a ∘ b finished for {_WORLD_SIZE}", 2, divisor=_WORLD_SIZE)


def check_agreement(case: Case) -> None:
    """Raises OperatorError unless all launchers compute the same, rounded once, whatever the shape of the launch."""
    trials = [_PAIR, _TRIPLE, _FOLD]
    if case.op.finishes:
        trials += [_Trial("a finished for 1", 1, divisor=1), _FINISHED]
        trials += [_Trial(f"a ∘ b finished for {each}", 2, divisor=each) for each in _OTHER_WORLD_SIZES]
    if case.op.scale is not None:
        trials.append(_Trial(f"a scaled by {case.op.scale}", 1, scale=case.op.scale))
    first, *others = case.runners
    expected = {trial: trial.run(case, first) for trial in trials}
    for trial in trials:
        if trial not in (_TRIPLE, _FOLD):
            check_rounding(case, trial.text, trial.num_operands, trial.divisor, trial.scale, expected[trial])
    _check_self_consistent(case, first, expected)
    for runner in others:
        found = {trial: trial.run(case, runner) for trial in trials}
        for trial in trials:
            operands = case.operands[: trial.num_operands]
            pair = ((f"{first.name}: {trial.text}", expected[trial]), (f"{runner.name}: {trial.text}", found[trial]))
            complaint = f"has launchers that disagree on {trial.text}"
            before = [each for each in (_PAIR, _TRIPLE) if each.num_operands < trial.num_operands]
            partials = [(expected[each], found[each]) for each in before]
            _require_same(case, runner, "launchers agree", complaint, operands, pair, partials)
        _check_self_consistent(case, runner, found)


def _check_self_consistent(case: Case, runner: Runner, found: dict[_Trial, Lanes]) -> None:
    """Folds in one launch equal folds in several; ``out`` may be an operand; finishing is done once, at the end."""
    operands = case.operands[:4]
    partial = convert(operands[0], case.accumulation)
    for lanes in operands[1:]:
        partial = runner.combine(case.wide_op, [partial, convert(lanes, case.accumulation)])
    pair = (("in one launch", found[_FOLD]), ("in three launches", _stored(case, partial)))
    complaint = f"folds {_FOLD.text} in one launch unlike in several"
    _require_same(case, runner, "one fold", complaint, operands, pair)
    for alias in range(2):
        result = runner.combine(case.op, operands[:2], alias=alias)
        name = "ab"[alias]
        pair = (("a ∘ b", found[_PAIR]), (f"a ∘ b stored in {name}", result))
        _require_same(case, runner, "aliasing", f"depends on whether out is {name}", operands[:2], pair)
    if _FINISHED in found:
        folded = runner.combine(case.wide_op, [convert(lanes, case.accumulation) for lanes in operands[:2]])
        finished = runner.combine(case.wide_op, [folded], divisor=_WORLD_SIZE)
        pair = (("in one launch", found[_FINISHED]), ("the fold, then finished", _stored(case, finished)))
        _require_same(case, runner, "finished once", "is not finished once, after the fold", operands[:2], pair)


def _stored(case: Case, lanes: Lanes) -> Lanes:
    """A result of the accumulation type in the element types."""
    return convert(lanes, case.dtypes)


def _require_same(
    case: Case,
    runner: Runner,
    law: str,
    complaint: str,
    operands: Sequence[Lanes],
    pair: tuple[tuple[str, Lanes], tuple[str, Lanes]],
    partials: Sequence[tuple[Lanes, Lanes]] = (),
) -> None:
    """Raises OperatorError where they differ by more than is allowed. ``partials``: what each computed on the way."""
    (_, expected), (_, found) = pair
    ulps = case.ulps_allowed(runner)
    num_excused = 0
    zero_signs = case.settings.zero_signs is not False
    tolerances: list[Array | None] = [None] * len(found)
    if ulps > 0:
        results = (expected, found)
        tolerances = [
            _tolerance(case, lane, operands, results, ulps) if is_float(dtype) else None
            for lane, dtype in enumerate(case.dtypes)
        ]
    failing = differs(expected, found, case.count, tolerances, zero_signs)
    if ulps == 0:
        complaint += " (to the bit: its functions are rounded exactly)"
    else:
        excused = _overflow_apart(case, partials)
        num_excused = int((failing & excused).sum())
        failing = failing & ~excused
    case.require(law, complaint, runner.name, operands, list(pair), failing, num_excused)


def _overflow_apart(case: Case, partials: Sequence[tuple[Lanes, Lanes]]) -> Array:
    """Rows in which one of two nearly equal partial results overflows: they have no tolerance once more is added."""
    rows = np.zeros(case.count, dtype=bool)
    for expected, found in partials:
        for lane in case.float_lanes:
            one, two = case.columns((expected, found), lane)
            rows |= (np.isfinite(one) != np.isfinite(two)).any(axis=1)
    return rows


def _tolerance(case: Case, lane: int, operands: Sequence[Lanes], results: Sequence[Lanes], ulps: float) -> Array:
    """So many units of the accumulation type at the largest value, each combine; and the next value that is stored."""
    ulps *= max(1, len(operands) - 1)
    stored, accumulation = case.dtypes[lane], case.accumulation[lane]
    values = case.columns(results, lane)
    tolerance: Array = ulps * ulp(magnitude([*values, *case.columns(operands, lane)]), case.coarsest)
    if stored != accumulation:
        tolerance += 2 * half_ulp(magnitude(values), stored)
    return tolerance

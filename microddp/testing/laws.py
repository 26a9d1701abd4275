"""The declared laws, as algebra: computed so much wider than needed that rounding is not mistaken for a broken law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from microddp.testing.case import Case
from microddp.testing.compare import differs, magnitude
from microddp.testing.sensitivity import MARGIN, spread_apart, spread_of
from microddp.testing.states import Array, Lanes, is_float, take

__all__ = ["check_laws"]

_Combine = Callable[[Lanes, Lanes], Lanes]
_Expression = Callable[..., Lanes]


@dataclass(frozen=True)
class _Law:
    """Two expressions that a law requires to be equal."""

    name: str
    num_operands: int
    texts: tuple[str, str]
    expressions: tuple[_Expression, _Expression]


_COMMUTATIVE: Final = _Law(
    "commutative",
    2,
    ("a ∘ b", "b ∘ a"),
    (lambda combine, a, b: combine(a, b), lambda combine, a, b: combine(b, a)),
)
_ASSOCIATIVE: Final = _Law(
    "associative",
    3,
    ("(a ∘ b) ∘ c", "a ∘ (b ∘ c)"),
    (lambda combine, a, b, c: combine(combine(a, b), c), lambda combine, a, b, c: combine(a, combine(b, c))),
)


def check_laws(case: Case) -> None:
    """Raises OperatorError unless the laws that the operator declares hold."""
    for law, is_declared in ((_COMMUTATIVE, case.op.commutative), (_ASSOCIATIVE, case.op.associative)):
        if is_declared:
            _check_law(case, law)


def _check_law(case: Case, law: _Law) -> None:
    operands = case.law_operands[: law.num_operands]
    seen = list(operands)

    def combine(first: Lanes, second: Lanes) -> Lanes:
        seen.append(case.combine_widened([first, second]))
        return seen[-1]

    left, right = (expression(combine, *operands) for expression in law.expressions)
    zero_signs = case.is_plain if case.settings.zero_signs is None else case.settings.zero_signs
    tolerances = [
        case.law_rtol * magnitude(case.columns(seen, lane)) if is_float(dtype) else None
        for lane, dtype in enumerate(case.law_dtypes)
    ]
    failing = differs(left, right, case.count, tolerances, zero_signs)
    num_failing = int(failing.sum())
    if case.samples is None and not case.is_plain:
        failing &= ~_differ_by_infinities(case, operands, left, right)
    if failing.any():
        failing = _beyond_rounding(case, law, operands, (left, right), failing, tolerances, zero_signs)
    case.require(
        law.name,
        f"is declared {law.name}, and is not{_hint(case, failing, left, right, zero_signs)}",
        f"{case.runners[0].name} in {case.law_type}" if case.float_lanes else case.runners[0].name,
        operands,
        list(zip(law.texts, (left, right))),
        failing,
        num_failing - int(failing.sum()),
    )


def _differ_by_infinities(case: Case, operands: Sequence[Lanes], left: Lanes, right: Lanes) -> Array:
    """Rows where NaN comes of infinite operands on one side: matrices and complex numbers of infinities obey no law."""
    infinite, unequal = np.zeros(case.count, dtype=bool), np.zeros(case.count, dtype=bool)
    for lane in case.float_lanes:
        for values in case.columns(operands, lane):
            infinite |= np.isinf(values).any(axis=1)
        one, two = case.columns((left, right), lane)
        unequal |= (np.isnan(one) != np.isnan(two)).any(axis=1)
    return infinite & unequal


def _beyond_rounding(
    case: Case,
    law: _Law,
    operands: Sequence[Lanes],
    sides: tuple[Lanes, Lanes],
    failing: Array,
    tolerances: Sequence[Array | None],
    zero_signs: bool,
) -> Array:
    """The failing rows that differ by more than small errors in the operands and in what is between would make."""
    rows = np.flatnonzero(failing)
    few = [take(case.op, lanes, rows) for lanes in operands]
    few_sides = [take(case.op, lanes, rows) for lanes in sides]

    def evaluate(touch: Callable[[Lanes], Lanes]) -> list[Lanes]:
        def combine(first: Lanes, second: Lanes) -> Lanes:
            return case.combine_widened([touch(first), touch(second)])

        return [expression(combine, *few) for expression in law.expressions]

    still: Array = np.ones(len(rows), dtype=bool)
    for measure in (spread_of, spread_apart):
        spread = measure(case, few_sides, evaluate, case.law_noise)
        wider = [
            None if tolerance is None else tolerance[rows] + MARGIN * spread[lane]
            for lane, tolerance in enumerate(tolerances)
        ]
        still &= differs(few_sides[0], few_sides[1], len(rows), wider, zero_signs)
        if not still.any():
            break
    found = np.zeros_like(failing)
    found[rows] = still
    return found


def _hint(case: Case, failing: Array, left: Lanes, right: Lanes, zero_signs: bool) -> str:
    """If it is all about the signs of zeros, that the caller may not care."""
    if not zero_signs or not failing.any():
        return ""
    rows = np.flatnonzero(failing)
    sides = (take(case.op, left, rows), take(case.op, right, rows))
    if differs(*sides, len(rows), [None] * len(left), zero_signs=False).any():
        return ""
    return " in the signs of zeros (if these do not matter, pass zero_signs=False)"

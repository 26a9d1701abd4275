"""What the operator claims of NaN, in every position of folds of two and three operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from microddp.testing.case import Case
from microddp.testing.compare import differs
from microddp.testing.runners import Runner
from microddp.testing.states import Array, Lanes, take

__all__ = ["check_nan_claim"]

_ROWS: Final = 512
_NAMES: Final = ("first", "second", "third")


def check_nan_claim(case: Case) -> None:
    """Raises OperatorError unless the operator treats NaN as it claims, on every launcher.

    "propagate": where an operand has NaN in a float lane, that lane of the result is NaN, whatever the other operands
    are. "ignore": an operand whose float lanes are all NaN is as good as absent.
    """
    if case.op.nan is None or not case.float_lanes:
        return
    rows = np.linspace(0, case.count - 1, min(_ROWS, case.count)).astype(np.int64)
    operands = [take(case.op, lanes, rows) for lanes in case.operands[:3]]
    for runner in case.runners:
        for count in (2, 3):
            for position in range(count):
                if case.op.nan == "propagate":
                    _check_propagates(case, runner, operands[:count], position)
                else:
                    _check_ignores(case, runner, operands[:count], position)


def _with_nan(lanes: Lanes, chosen: Sequence[int]) -> Lanes:
    return tuple(
        torch.full(tensor.shape, float("nan")).to(tensor.dtype) if lane in chosen else tensor
        for lane, tensor in enumerate(lanes)
    )


def _check_propagates(case: Case, runner: Runner, operands: Sequence[Lanes], position: int) -> None:
    for lane in case.float_lanes:
        given = list(operands)
        given[position] = _with_nan(operands[position], [lane])
        result = runner.combine(case.op, given)
        (values,) = case.columns([result], lane)
        # Of a complex number, one part at least.
        has_nan = np.isnan(values).any(axis=1) if case.dtypes[lane].is_complex else np.isnan(values).all(axis=1)
        failing: Array = np.logical_not(has_nan)
        where = f" of lane {case.op.lanes[lane].name!r}" if case.op.lanes else ""
        complaint = (
            f"claims to propagate NaN, and loses that{where} in the {_NAMES[position]} of {len(operands)} operands"
        )
        case.require("nan propagates", complaint, runner.name, given, [("result", result)], failing)


def _check_ignores(case: Case, runner: Runner, operands: Sequence[Lanes], position: int) -> None:
    given = list(operands)
    given[position] = _with_nan(operands[position], case.float_lanes)
    others = [lanes for index, lanes in enumerate(given) if index != position]
    result = runner.combine(case.op, given)
    expected = runner.combine(case.op, others) if len(others) > 1 else others[0]
    exact: list[Array | None] = [None] * len(result)
    zero_signs = case.settings.zero_signs is not False
    failing = differs(result, expected, len(case.columns([result], 0)[0]), exact, zero_signs)
    complaint = f"claims to ignore NaN, and does not in the {_NAMES[position]} of {len(operands)} operands"
    case.require("nan ignored", complaint, runner.name, given, [("result", result), ("expected", expected)], failing)

"""Runs operators of several lanes on states that tests write down, and compares bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from microddp_kernels import CombineSpec, ReduceOp, get_op, launcher_for

INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")
on_each_launcher = pytest.mark.parametrize("launcher", ["eager", "interpreter"])

State = tuple[torch.Tensor, ...]


def combine(launcher: str, name: str | ReduceOp, states: Sequence[State], **how: Any) -> State:
    """The states folded from the left."""
    op = get_op(name)
    out = tuple(torch.empty_like(lane) for lane in states[0])
    operands = [state if op.lanes else state[0] for state in states]
    launcher_for(CPU, launcher).combine(out if op.lanes else out[0], operands, CombineSpec(op, **how))
    return out


def one_by_one(launcher: str, name: str, states: Sequence[State]) -> State:
    """The same in launches of two operands."""
    total = states[0]
    for state in states[1:]:
        total = combine(launcher, name, [total, state])
    return total


def tensors(*lanes: Sequence[float], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> State:
    kinds = [*dtypes, *[dtypes[-1]] * (len(lanes) - len(dtypes))]
    return tuple(torch.tensor(lane, dtype=torch.float64).to(kind) for lane, kind in zip(lanes, kinds))


def require_same(found: State, expected: Sequence[Sequence[float]]) -> None:
    """Equal bits, but for the payload of NaN."""
    for lane, values in zip(found, expected, strict=True):
        wanted = torch.tensor(values, dtype=torch.float64)
        got = lane.to(torch.float64)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        numbers = ~wanted.isnan()
        assert torch.equal(got.signbit()[numbers], wanted.signbit()[numbers]), (got, wanted)

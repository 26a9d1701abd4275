"""What ``check_operator`` checks of launchers is found when a launcher breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from microddp.testing import OperatorError, check_operator, runners
from microddp_kernels import CombineSpec, ReduceOp
from microddp_kernels.launchers import EagerLauncher, Launcher, launcher_for
from microddp_kernels.reduce_op import Values
from tests.testing import user_functions as functions
from tests.testing.operators import make_op

pytestmark = pytest.mark.timeout(60)


class _Broken(EagerLauncher):
    """Breaks one rule on one-lane operators."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec) -> None:
        fault = self._fault
        tensor = out if isinstance(out, torch.Tensor) else out[0]
        if fault == "writes out first":
            tensor.zero_()
        if fault == "folds from the right" and len(operands) > 2:
            operands = list(reversed(operands))
        super().combine(out, operands, how)
        if fault == "finishes twice" and how.divisor is not None and len(operands) > 1:
            super().combine(out, [out], how)
        if fault == "truncates" and tensor.dtype == torch.bfloat16:
            tensor.view(torch.int16).sub_(1)
        if fault == "forgets the last element":
            tensor.view(torch.uint8)[-tensor.element_size() :] = 0x5A
        if fault == "raises":
            raise ZeroDivisionError("planted")
        if fault == "finishes always" and how.op.finalize is not None and how.divisor is None:
            super().combine(out, [out], CombineSpec(how.op, divisor=3))


TWINS: dict[str, Any] = {"torch_function": torch.add, "torch_finalize": lambda value, world_size: value * 0.5}
HALVED = make_op(functions.add, finalize=functions.halved, associative=False, **TWINS)
NARROW = make_op(functions.add, frozenset({torch.bfloat16}), torch_function=torch.add)
PLAIN = make_op(functions.add, torch_function=torch.add)
CASES = [
    ("writes out first", NARROW, "aliasing"),
    ("folds from the right", make_op(functions.subtract, commutative=False, associative=False), "one fold"),
    ("finishes twice", HALVED, "finished once"),
    ("finishes always", HALVED, "one fold"),
    ("truncates", NARROW, "rounded once"),
    ("forgets the last element", PLAIN, "rounded once"),
    ("raises", NARROW, "runs"),
]


@pytest.mark.parametrize(("fault", "op", "law"), CASES)
def test_fault_is_found(fault: str, op: ReduceOp, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_launcher(device: torch.device, name: str) -> Launcher:
        return _Broken(fault)

    monkeypatch.setattr(runners, "launcher_for", broken_launcher)
    with pytest.raises(OperatorError) as caught:
        check_operator(op, launchers=["eager"], numel=64)
    assert caught.value.law == law


def test_launchers_that_fill_in_differently_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_broken(device: torch.device, name: str) -> Launcher:
        return _Broken("forgets the last element") if name == "eager" else launcher_for(device, name)

    monkeypatch.setattr(runners, "launcher_for", one_broken)
    with pytest.raises(OperatorError) as caught:
        check_operator(PLAIN, numel=64)
    assert (caught.value.law, caught.value.launcher) == ("launchers agree", "eager")

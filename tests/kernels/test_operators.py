"""The registry of operators, and what operators and launchers refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microddp_kernels import CombineSpec, ReduceOp, get_op, op_names
from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from tests.kernels.oracle import COMPLEX, FLOATS, FLOATS8, INTEGERS, LEGAL

pytestmark = pytest.mark.timeout(60)

EVERY_DTYPE = (*FLOATS, *FLOATS8, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e8m0fnu)
ILLEGAL = [(name, dtype) for name, legal in LEGAL.items() for dtype in EVERY_DTYPE if dtype not in legal]
on_each_launcher = pytest.mark.parametrize(
    "launcher", [EagerLauncher(), InterpreterLauncher()], ids=lambda each: each.name
)


def test_every_operator_is_known_by_name() -> None:
    assert set(LEGAL) <= set(op_names())
    for name, legal in LEGAL.items():
        op = get_op(name)
        assert op.name == name and op.dtypes == set(legal)
        assert op.commutative and op.associative and op.divides == (name == "avg")
        assert get_op(op) is op


def test_unknown_operators() -> None:
    with pytest.raises(ValueError, match=r"unknown operator 'summ'; known operators: sum, prod, min, max, avg, band"):
        get_op("summ")
    for wrong in (None, 7, torch.add):
        with pytest.raises(TypeError, match="op must be the name of an operator or a ReduceOp, not"):
            get_op(wrong)  # type: ignore[arg-type]


def test_types_of_computation() -> None:
    for name, legal in LEGAL.items():
        for dtype in legal:
            widened = dtype in (torch.float16, torch.bfloat16, *FLOATS8)
            assert get_op(name).accumulation_dtype(dtype) == (torch.float32 if widened else dtype)
            travels = name == "avg" and dtype in (torch.float16, *FLOATS8)
            assert get_op(name).travels_as_mean(dtype) == travels


@on_each_launcher
@pytest.mark.parametrize(("name", "dtype"), ILLEGAL)
@pytest.mark.parametrize("count", [2, 3])
def test_types_without_a_meaning_are_refused(launcher: Launcher, name: str, dtype: torch.dtype, count: int) -> None:
    op, out = get_op(name), torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    text = rf"operator '{name}' is not defined on {str(dtype).removeprefix('torch.')}; it is defined on \w+, "
    with pytest.raises(TypeError, match=text):
        op.check_dtype(dtype)
    with pytest.raises(TypeError, match=text):
        launcher.combine(out, [torch.full_like(out.view(torch.uint8), 1).view(dtype)] * count, CombineSpec(op))
    assert out.view(torch.uint8).eq(0).all()


def spec(name: str, **scaling: Any) -> CombineSpec:
    return CombineSpec(get_op(name), **scaling)


FOUR = torch.zeros(4)
REFUSED: list[tuple[torch.Tensor, list[Any], CombineSpec, type[Exception], str]] = [
    (FOUR, [], spec("sum"), ValueError, "combine takes one or more operands, got none"),
    (FOUR, [FOUR, FOUR], spec("sum", scale=2.0), ValueError, "a scale is for one operand of one lane, got 2"),
    (FOUR.int(), [FOUR.int()], spec("sum", scale=2.0), TypeError, "only floats are weighted, scaled or divided"),
    (FOUR, [(FOUR, FOUR)], spec("sum"), ValueError, "operator 'sum' takes 1 lanes, got 2"),
    (FOUR, [FOUR, torch.zeros(5)], spec("sum"), ValueError, "out has 4 elements, an operand 5"),
    (FOUR, [FOUR, torch.zeros(1)], spec("sum"), ValueError, "out has 4 elements, an operand 1"),
    (torch.zeros(5), [FOUR, FOUR], spec("sum"), ValueError, "out has 5 elements, an operand 4"),
    (FOUR, [FOUR, FOUR, torch.zeros(2, 2)], spec("sum"), ValueError, r"1-D contiguous tensors, got shape \(2, 2\)"),
    (FOUR, [FOUR, FOUR, torch.zeros(8)[::2]], spec("sum"), ValueError, r"1-D contiguous.* strides \(2,\)"),
    (FOUR, [FOUR, FOUR], spec("avg", weights=(1, 2, 3)), ValueError, "2 operands take 2 weights"),
    (FOUR, [FOUR, FOUR], spec("avg", weights=(1, 0)), ValueError, "weights of at least 1"),
    (FOUR, [FOUR, FOUR], spec("avg", weights=(2**24, 1)), ValueError, "weights must add up to at most 16777216"),
    (FOUR, [FOUR, FOUR], spec("avg", divisor=0), ValueError, "divisor must be from 1 to 16777216, got 0"),
    (FOUR, [FOUR, FOUR], spec("avg", divisor=2, weights=(1, 1)), ValueError, "weights or a divisor, not both"),
    (FOUR, [FOUR, FOUR.int()], spec("sum"), TypeError, "only floats combine with other types, got float32, int32"),
    (
        FOUR.int(),
        [FOUR.int()] * 2,
        spec("sum", divisor=2),
        TypeError,
        "only floats are weighted, scaled or divided, not int32",
    ),
    (FOUR.half(), [FOUR.double()] * 2, spec("sum"), TypeError, "cannot be combined into float16"),
]


@on_each_launcher
@pytest.mark.parametrize(("out", "operands", "how", "error", "text"), REFUSED)
def test_what_makes_no_sense_is_refused(
    launcher: Launcher,
    out: torch.Tensor,
    operands: list[Any],
    how: CombineSpec,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        launcher.combine(out, operands, how)


@on_each_launcher
def test_copies_that_make_no_sense_are_refused(launcher: Launcher) -> None:
    with pytest.raises(ValueError, match=r"out has shape \(4,\), source \(1,\)"):
        launcher.copy(FOUR, torch.zeros(1))
    with pytest.raises(TypeError, match="copy converts between floats only: out is float32, source int32"):
        launcher.copy(FOUR, FOUR.int())
    with pytest.raises(TypeError, match="float64 cannot be copied to float8_e5m2: it would be rounded twice"):
        launcher.copy(FOUR.to(torch.float8_e5m2), FOUR.double())


@on_each_launcher
def test_tensors_of_another_device_are_refused(launcher: Launcher) -> None:
    elsewhere = torch.zeros(4, device="meta")
    with pytest.raises(
        ValueError, match=f"the {launcher.name} launcher works on tensors of one cpu device, got cpu, meta"
    ):
        launcher.combine(FOUR, [FOUR, elsewhere, FOUR], spec("sum"))


def test_an_operator_of_ones_own_needs_no_registration() -> None:
    difference = ReduceOp("difference", None, torch.sub, frozenset({torch.float32}), commutative=False)
    out = torch.empty(4)
    EagerLauncher().combine(out, [torch.full((4,), value) for value in (9.0, 3.0, 1.0)], CombineSpec(difference))
    assert out.tolist() == [5.0] * 4

"""``check_operator`` finds what is wrong with operators, says so plainly, and lets right ones pass."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import microddp_kernels.lane_operators  # noqa: F401  (registers the operators)
from microddp.testing import OperatorError, check_operator
from microddp_kernels import ReduceOp, get_op, op_names
from microddp_kernels.dtypes import FLOATS
from microddp_kernels.lane_operators import premul_sum
from tests.testing import user_functions as functions
from tests.testing.mutants import MUTANTS, Mutant
from tests.testing.operators import ENTRIES, F32, REALS, SAMPLES, WEIGHT_AND_ROWS, make_op

pytestmark = pytest.mark.timeout(120)

SHIPPED = ("argmax", "argmin", "welford", "logsumexp", "softmax_merge", "absmax", "logaddexp")
BUILT_IN = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
FEW_TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.uint32, torch.bool)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.about)
def test_mutant_is_found(mutant: Mutant) -> None:
    with pytest.raises(OperatorError) as caught:
        check_operator(mutant.op, samples=mutant.samples, numel=512)
    found = caught.value
    assert (found.law, found.launcher.partition(" ")[0]) == (mutant.law, mutant.launcher)
    assert mutant.op.name in str(found) and str(found.dtypes[0]).removeprefix("torch.") in str(found)


@pytest.mark.parametrize("name", [*BUILT_IN, *SHIPPED])
def test_registered_operator_passes(name: str) -> None:
    op = get_op(name)
    dtypes = [dtype for dtype in FEW_TYPES if dtype in op.dtypes] if name in BUILT_IN else None
    report = check_operator(op, dtypes=dtypes, samples=SAMPLES.get(name), numel=512)
    assert {"commutative", "associative", "launchers agree", "one fold", "aliasing"} <= set(report.laws)
    assert ("nan propagates" in report.laws) == (op.nan == "propagate")
    assert ("finished once" in report.laws) == op.finishes
    _require_few_excuses(report.records)


def test_no_registered_operator_is_left_out() -> None:
    assert {*BUILT_IN, *SHIPPED} <= set(op_names())


def _require_few_excuses(records: Any) -> None:
    """What is put down to rounding or infinities must not hide what is compared."""
    for record in records:
        assert record.num_excused <= 0.3 * record.num_rows, record


USERS = [
    make_op(functions.largest_size, REALS, nan="propagate"),
    make_op(functions.larger_number, nan="ignore"),
    make_op(functions.length, FLOATS),
    make_op(functions.matrix_product, lanes=ENTRIES, commutative=False),
    make_op(functions.quaternion_product, lanes=ENTRIES, commutative=False),
    make_op(functions.max_plus_product, lanes=ENTRIES, commutative=False),
    make_op(functions.added_rows, lanes=WEIGHT_AND_ROWS),
    make_op(functions.subtract, FLOATS, commutative=False, associative=False),
    make_op(functions.add, frozenset({torch.int8, torch.int16}), accumulate=torch.int32),
    make_op(functions.add, frozenset({torch.float32, torch.bfloat16}), finalize=functions.per_rank, nan="propagate"),
    make_op(functions.add, F32, accumulate=torch.float64),
    premul_sum(-0.3),
]


@pytest.mark.parametrize("op", USERS, ids=lambda op: op.name)
def test_right_user_operator_passes(op: ReduceOp) -> None:
    """Without samples of its own."""
    report = check_operator(op, numel=512)
    assert "launchers agree" in report.laws
    _require_few_excuses(report.records)


def test_what_measures_its_own_rounding_is_not_compared_with_float64() -> None:
    def numbers(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> Any:
        total = torch.from_numpy(random.standard_normal(numel).astype(np.float32))
        return total, total * 2.0**-30

    op = make_op(functions.compensated_add, lanes=ENTRIES[:2])
    with pytest.raises(OperatorError, match="does not give what float64 gives"):
        check_operator(op, samples=numbers, numel=64)
    report = check_operator(op, samples=numbers, numel=64, rounds_once=False)
    assert "launchers agree" in report.laws and "rounded once" not in report.laws


def test_a_function_of_float32_only_is_checked_in_float32() -> None:
    report = check_operator(make_op(functions.length_in_float32), numel=512)
    assert {"commutative", "associative", "launchers agree"} <= set(report.laws)
    assert any("laws are checked in float32, not in float64" in note for note in report.notes)


def test_functions_of_libdevice_are_not_given_to_the_interpreter() -> None:
    report = check_operator(make_op(functions.length_of_libdevice), numel=512)
    assert {record.launcher.split()[0] for record in report.records} == {"eager"}
    assert {"commutative", "associative", "rounded once"} <= set(report.laws)


def test_only_zero_signs_differ() -> None:
    op = make_op(functions.larger_of_equal_ones_the_second)
    with pytest.raises(OperatorError, match=r"in the signs of zeros \(if these do not matter, pass zero_signs=False\)"):
        check_operator(op, numel=64)
    check_operator(op, numel=64, zero_signs=False)


def test_what_an_error_says() -> None:
    with pytest.raises(OperatorError) as caught:
        check_operator(make_op(functions.subtract, frozenset({torch.int8})), numel=64, seed=3)
    error = caught.value
    assert error.operands == (("0",), ("1",))  # the simplest pair of integers that differ
    assert error.results == (("a ∘ b", ("-1",)), ("b ∘ a", ("1",)))
    assert error.dtypes == (torch.int8,)
    heading, where, first, second, left, right, count = str(error).splitlines()
    assert heading == "operator 'subtract' is declared commutative, and is not"
    assert where.split() == ["types:", "int8;", "launcher:", "interpreter"]
    assert [line.strip() for line in (first, second, left, right)] == ["a = 0", "b = 1", "a ∘ b = -1", "b ∘ a = 1"]
    assert count.endswith("of 4160 combinations fail, seed 3)")


def test_lanes_are_named_in_an_error() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.about == "argmax, ties to the first operand")
    with pytest.raises(OperatorError, match=r"a = \(value=.*, index=-?\d+\)"):
        check_operator(mutant.op, numel=256)


def test_what_a_report_says() -> None:
    report = check_operator("argmax", dtypes=[(torch.float16, torch.int32), (torch.uint16, torch.int64)], numel=100)
    text = str(report)
    assert "operator 'argmax'" in text and "(float16, int32), (uint16, int64)" in text and "(seed 0)" in text
    assert all(law in text for law in report.laws)
    assert report.num_rows == sum(record.num_rows for record in report.records) > 4096 * 20
    assert {record.launcher for record in report.records} >= {"interpreter", "eager"}
    assert len(report.notes) <= 1  # torch computes on no uint16, so eager may have said that it fell back


def test_a_launcher_that_falls_back_is_noted_not_raised() -> None:
    op = make_op(functions.largest_size, frozenset({torch.uint32}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_operator(op, numel=64)
    assert len(report.notes) == 1 and "uint32" in report.notes[0] and "note: " in str(report)


def test_same_seed_same_samples() -> None:
    seen: list[torch.Tensor] = []

    def record(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        seen.append(torch.from_numpy(random.standard_normal(numel)).to(dtypes[0]))
        return seen[-1]

    for seed in (1, 1, 2):
        check_operator(make_op(functions.add), samples=record, seed=seed, numel=32, launchers=["eager"])
    one, again, other = (seen[index * len(seen) // 3 :][: len(seen) // 3] for index in range(3))
    assert all(torch.equal(first, second) for first, second in zip(one, again))
    assert not any(torch.equal(first, second) for first, second in zip(one, other))


def test_max_ulps() -> None:
    def rough(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(first + second, torch.tensor(0.0))

    op = make_op(functions.add, torch_function=rough)
    with pytest.raises(OperatorError, match="to the bit"):
        check_operator(op, numel=64)
    check_operator(op, numel=64, max_ulps=4, zero_signs=False)
    with pytest.raises(OperatorError):
        check_operator(op, numel=64, max_ulps=0.5, zero_signs=False)


def _float_samples(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    return torch.zeros(numel + 1, dtype=dtypes[0])


def _wrong_type(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.int64)


def _a_list(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    return [0.0] * numel


def _two_dimensions(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    return torch.zeros((numel, 1), dtype=dtypes[0])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"numel": 0}, ValueError, "numel must be a positive integer, got 0"),
        ({"numel": True}, ValueError, "numel must be a positive integer, got True"),
        ({"max_ulps": -1}, ValueError, "max_ulps must be at least 0, got -1"),
        ({"max_ulps": float("nan")}, ValueError, "max_ulps must be at least 0, got nan"),
        ({"rtol": 1.0}, ValueError, "rtol must be at least 0 and below 1, got 1.0"),
        ({"dtypes": []}, ValueError, "dtypes must name one element type at least"),
        ({"dtypes": [torch.int64]}, TypeError, "operator 'add' is not defined on int64"),
        ({"dtypes": [(torch.float32, torch.float32)]}, ValueError, "has 1 lanes; dtypes must give as many types"),
        ({"launchers": []}, ValueError, "launchers must name one launcher at least"),
        ({"launchers": ["fast"]}, ValueError, "no launcher 'fast' works on cpu"),
        ({"samples": _float_samples}, ValueError, r"samples was asked for 16 states, got lanes of \[17\] elements"),
        ({"samples": _wrong_type}, TypeError, "samples was asked for float32, got int64"),
        ({"samples": _a_list}, TypeError, "samples must return a tensor for operator 'add', got list"),
        ({"samples": _two_dimensions}, ValueError, "samples must return 1-D tensors, got shapes"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_operator(make_op(functions.add), **arguments)


def test_no_such_operator() -> None:
    with pytest.raises(ValueError, match="unknown operator 'summ'"):
        check_operator("summ")

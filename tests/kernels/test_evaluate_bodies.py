"""Whole bodies of users' functions on torch tensors: names, control flow, lanes, shapes, threads."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton

from microddp_kernels import CombineSpec, Lane, ReduceOp
from microddp_kernels.evaluate import NotEvaluable, evaluated
from microddp_kernels.evaluate.errors import ConditionOnTensor
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from microddp_kernels.reduce_op import KernelFunction
from tests.kernels import user_ops
from tests.kernels.evaluate_tools import EVERY, evaluate, interpreted, lanes_op, op_of, samples

pytestmark = pytest.mark.timeout(60)


def _numbers(seed: int, dtype: torch.dtype = torch.float64, count: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    first, second = torch.from_numpy(random.integers(-40, 40, (2, count)) / (4 if dtype.is_floating_point else 1))
    return first.to(dtype), second.to(dtype)


def test_largest_and_its_interpretation() -> None:
    first, second = samples(torch.float32, seed=0)
    op = op_of(user_ops.largest)
    found = evaluate(op, first, second)
    expected = np.maximum(np.abs(first.numpy()), np.abs(second.numpy()))
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    assert np.array_equal(found.numpy(), interpreted(op, first, second).numpy(), equal_nan=True)
    assert evaluated(op) is evaluated(op)


def _helped(a: Any, b: Any) -> Any:
    return a * 0.1 + b * 0.5 + (a + 1) * math.pi + 0.25


def _assigned(a: Any, b: Any) -> Any:
    return a * float(np.float32(0.1)) + b * 0.1 + 1


def _looped(a: Any, b: Any) -> Any:
    return a + 0 * b + 1 * b + 2 * b + 0 + 1 + b + b


def _logical(a: Any, b: Any) -> Any:
    between = (a > 0) & (a < 10)
    return np.where(((a > b) & (b > 0)) | between, np.where(between, b, a + b), a)


BODIES: list[tuple[Any, Callable[[Any, Any], Any]]] = [
    (user_ops.helped, _helped),
    (user_ops.assigned, _assigned),
    (user_ops.looped, _looped),
    (user_ops.second, lambda a, b: b),
    (user_ops.chosen, lambda a, b: a + b),
    (user_ops.imported, lambda a, b: np.maximum(a, b) + np.tanh(a) + np.exp(-np.abs(b))),
    (
        user_ops.logical,
        lambda a, b: np.where(((a > b) & (b > 0)) | ((a > 0) & (a < 10)), np.where((a > 0) & (a < 10), b, a + b), a),
    ),
]


@pytest.mark.parametrize(("body", "oracle"), BODIES, ids=lambda each: getattr(each, "__name__", ""))
def test_bodies(body: Any, oracle: Callable[[Any, Any], Any]) -> None:
    first, second = _numbers(1)
    kept = first.clone(), second.clone()
    found = evaluate(op_of(body), first, second)
    np.testing.assert_allclose(found.numpy(), oracle(first.numpy(), second.numpy()), rtol=4e-16, atol=1e-15)
    assert torch.equal(first, kept[0]) and torch.equal(second, kept[1])
    if body not in (user_ops.imported, user_ops.logical):  # of which the interpreter has no libdevice, and no `and`
        torch.testing.assert_close(found, interpreted(op_of(body), first, second), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "oracle"),
    [
        (torch.float64, lambda a, b: a + b),
        (torch.float32, lambda a, b: a - b),
        (torch.int32, lambda a, b: a * b),
        (torch.uint8, lambda a, b: a),
    ],
    ids=["float64", "float32", "int32", "uint8"],
)
def test_conditions_on_types(dtype: torch.dtype, oracle: Callable[[Any, Any], Any]) -> None:
    first, second = _numbers(2, dtype)
    assert torch.equal(evaluate(op_of(user_ops.chosen), first, second), oracle(first, second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.uint8, torch.uint32, torch.int64])
def test_results_have_the_type_and_shape_of_the_lane(dtype: torch.dtype) -> None:
    first, second = torch.tensor([3, 1, 2]).to(dtype), torch.tensor([1, 2, 2]).to(dtype)
    for body, expected in ((user_ops.constant, [2.5] * 3), (user_ops.truth, [1, 0, 0]), (user_ops.second, [1, 2, 2])):
        found = evaluate(op_of(body), first, second)
        assert isinstance(found, torch.Tensor) and found.is_contiguous() and found.dtype == dtype
        assert found.tolist() == (expected if dtype.is_floating_point else [int(each) for each in expected])


def test_results_share_no_memory_with_operands() -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    found = evaluate(op_of(user_ops.second), first, second)
    assert isinstance(found, torch.Tensor) and found.data_ptr() != second.data_ptr()
    lanes = (torch.ones(3), torch.full((3,), 5.0)), (torch.full((3,), 2.0), torch.full((3,), 7.0))
    swapped = evaluated(lanes_op(user_ops.exchanged, "one", "other")).combine(*lanes)
    assert [each.tolist() for each in swapped] == [[7.0] * 3, [1.0] * 3]
    pointers = {each.data_ptr() for values in lanes for each in values}
    assert not pointers & {each.data_ptr() for each in swapped}


def test_lanes() -> None:
    op = lanes_op(user_ops.pair, "value", "mark")
    first = torch.tensor([1.0, 5.0, 2.0, math.nan]), torch.tensor([10, 11, 12, 13])
    second = torch.tensor([2.0, 4.0, 2.0, 0.0]), torch.tensor([20, 21, 22, 23])
    value, mark = evaluated(op).combine(first, second)
    assert mark.dtype == torch.int64 and mark.tolist() == [20, 11, 12, 13]
    assert value[:3].tolist() == [2.0, 5.0, 2.0] and value[3].isnan()


def test_wide_lanes() -> None:
    random = np.random.default_rng(4)
    first, second = ((random.random((5, 1)) + 1, random.random((5, 7))) for _ in range(2))
    op = lanes_op(user_ops.rows, "weight", "values", wide=["values"])
    operands = [tuple(map(torch.from_numpy, each)) for each in (first, second)]
    weight, values = evaluated(op).combine(*operands)
    total = first[0] + second[0]
    np.testing.assert_array_equal(weight.numpy(), total)
    np.testing.assert_allclose(values.numpy(), (first[1] * first[0] + second[1] * second[0]) / total, rtol=1e-15)
    wrong = lanes_op(user_ops.broadcast_rows, "weight", "values", wide=["values"])
    with pytest.raises(ValueError, match=r"shape \(5, 7\) for lane 'weight', which has shape \(5, 1\).*narrow"):
        evaluated(wrong).combine(*operands)


@pytest.mark.parametrize("number", [1, 3])
def test_a_wrong_number_of_lanes_is_refused(number: int) -> None:
    one = torch.ones(2)
    declared = op_of(user_ops.two) if number == 1 else lanes_op(user_ops.two, *"abc"[:number])
    operand = one if number == 1 else (one,) * number
    with pytest.raises(ValueError, match=rf"'\w+' has {'one lane' if number == 1 else '3 lanes'}, but returned 2"):
        evaluated(declared).combine(operand, operand)


def test_finalize() -> None:
    values = torch.tensor([2.0, 3.0])
    op = op_of(user_ops.largest, finalize=user_ops.mean)
    for world_size, expected in ((4, [0.5, 0.75]), (1, [2.0, 3.0])):
        found = evaluated(op).finalize(values, world_size)
        assert isinstance(found, torch.Tensor) and found.tolist() == expected
    both = ReduceOp("both", user_ops.pair, None, EVERY, (Lane("a", EVERY), Lane("b", EVERY)), finalize=user_ops.means)
    mean, count = evaluated(both).finalize((values, torch.tensor([1, 2])), 2)
    assert mean.tolist() == [1.0, 1.5] and count.tolist() == [3, 4] and count.dtype == torch.int64
    with pytest.raises(ValueError, match="has no finalize"):
        evaluated(op_of(user_ops.largest)).finalize(values, 2)


def test_what_falls_back_is_named_when_it_is_reached() -> None:
    one = torch.ones(2)
    with pytest.raises(NotEvaluable, match="inline_asm_elementwise"):
        evaluate(op_of(user_ops.by_assembler), one, one)
    op = op_of(user_ops.if_float_by_assembler)
    with pytest.raises(NotEvaluable, match="inline_asm_elementwise"):
        evaluate(op, one, one)
    assert evaluate(op, one.int(), one.int()).tolist() == [2, 2]
    with pytest.raises(NotEvaluable, match="^TypeError: .* not supported between"):
        evaluated(lanes_op(user_ops.mean, "one")).combine((one,), (one,))


def test_a_condition_on_elements_is_wrong_everywhere() -> None:
    one = torch.ones(2)
    with pytest.raises(ConditionOnTensor, match=r"tl\.where"):
        evaluate(op_of(user_ops.mean), one, one)


def test_a_function_inside_another_with_a_helper_beside_it() -> None:
    @triton.jit
    def doubled(value):  # type: ignore[no-untyped-def]
        return value * 2

    @triton.jit
    def inner(a, b):  # type: ignore[no-untyped-def]
        return doubled(a) + b

    assert evaluate(op_of(inner), torch.ones(2), torch.ones(2)).tolist() == [3.0, 3.0]


def test_operators_by_name_and_empty_operands() -> None:
    op = op_of(KernelFunction("tests.kernels.user_ops", "largest"))
    found = evaluate(op, torch.empty(0), torch.empty(0))
    assert isinstance(found, torch.Tensor) and found.shape == (0,)


def test_threads_evaluate_while_another_interprets() -> None:
    """The interpreter replaces what ``triton.language`` holds while it runs; twins made meanwhile must not see it."""
    start = threading.Barrier(5)
    failures: list[BaseException] = []
    first, second = _numbers(5, torch.float32, count=40)
    bodies = [(user_ops.largest, lambda a, b: np.maximum(abs(a), abs(b))), (user_ops.imported, BODIES[5][1])] * 2

    def work(body: Any, oracle: Callable[[Any, Any], Any]) -> None:
        try:
            start.wait(30)
            for _ in range(60):
                # A module of its own for each operator, so that its names are looked up anew.
                twin = _fresh(body)
                found = evaluate(op_of(twin), first, second)
                np.testing.assert_allclose(found.numpy(), oracle(first.numpy(), second.numpy()), rtol=1e-6)
        except BaseException as error:
            failures.append(error)

    def interpret() -> None:
        try:
            out, launcher = torch.empty_like(first), InterpreterLauncher(block=16)
            start.wait(30)
            for _ in range(15):
                launcher.combine(out, [first, second], CombineSpec(op_of(user_ops.largest)))
                assert torch.equal(out, torch.maximum(first.abs(), second.abs()))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=each) for each in bodies] + [threading.Thread(target=interpret)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def _fresh(body: Any) -> Any:
    """The same jitted function with a Python function of its own, of which there is no twin yet."""
    original = body.fn
    copy = types.FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__)
    return triton.jit(copy)

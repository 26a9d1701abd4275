"""Triton's integer arithmetic on torch tensors, against Python's integers and the interpreter."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from microddp_kernels.evaluate import NotEvaluable
from microddp_kernels.evaluate.evaluated_op import _wrapped
from microddp_kernels.evaluate.twin import twin_of
from tests.kernels.evaluate_tools import evaluate, interpreted, module_of, op_of, samples

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def _quotient(first: int, second: int) -> int:
    """Towards zero."""
    size = abs(first) // abs(second)
    return size if (first < 0) == (second < 0) else -size


def _remainder(first: int, second: int) -> int:
    return first - _quotient(first, second) * second


# An expression (its divisor is never 0, a shift from 0 to 7), and what it is of Python's integers.
INTEGERS: list[tuple[str, Callable[[int, int], int]]] = [
    ("a + b", operator.add),
    ("a - b", operator.sub),
    ("a * b", operator.mul),
    ("a // (b | 1)", lambda a, b: _quotient(a, b | 1)),
    ("a % (b | 1)", lambda a, b: _remainder(a, b | 1)),
    ("tl.cdiv(a, (b & 7) + 1)", lambda a, b: _quotient(a + (b & 7), (b & 7) + 1)),
    ("a & b", operator.and_),
    ("a | b", operator.or_),
    ("a ^ b", operator.xor),
    ("~a", lambda a, b: ~a),
    ("-a", lambda a, b: -a),
    ("a << (b & 7)", lambda a, b: a << (b & 7)),
    ("a >> (b & 7)", lambda a, b: a >> (b & 7)),
    ("a >> 3", lambda a, b: a >> 3),
    ("(a >> 1) + (a << 2)", lambda a, b: (a >> 1) + (a << 2)),
    ("tl.maximum(a, b)", max),
    ("tl.minimum(a, b)", min),
    ("tl.clamp(a, 3, 100)", lambda a, b: min(max(a, 3), 100)),
    ("tl.abs(a)", lambda a, b: abs(a)),
    ("tl.where(a < b, a, b)", lambda a, b: a if a < b else b),
    ("tl.where((a <= b) & (a != 7), 3, b)", lambda a, b: 3 if a <= b and a != 7 else b),
    ("tl.where((a > b) | (a == 7), a, 5)", lambda a, b: a if a > b or a == 7 else 5),
    ("(a >= b) + a", lambda a, b: (a >= b) + a),
    ("(a.to(tl.int1) & b.to(tl.int1)).to(a.dtype)", lambda a, b: int(bool(a) and bool(b))),
    ("((a > b) + (a != b)).to(a.dtype)", lambda a, b: ((a > b) + (a != b)) % 2),
    ("((a > b) * (a != b) - (a == b)).to(a.dtype)", lambda a, b: (a > b) ^ (a == b)),
]


@pytest.fixture(scope="module")
def integer_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return module_of(tmp_path_factory.mktemp("integers"), [text for text, _ in INTEGERS])


def _check(found: Any, dtype: torch.dtype, expected: list[int]) -> None:
    assert found.dtype == dtype
    modulus = 1 << (8 * dtype.itemsize)
    assert [value % modulus for value in found.tolist()] == [value % modulus for value in expected]


@pytest.mark.parametrize("number", range(len(INTEGERS)), ids=[text for text, _ in INTEGERS])
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_integers(integer_module: ModuleType, number: int, dtype: torch.dtype) -> None:
    text, oracle = INTEGERS[number]
    op = op_of(getattr(integer_module, f"f{number}"))
    first, second = samples(dtype, seed=number, count=60)
    if dtype == torch.uint64 and ("//" in text or "%" in text or "cdiv" in text):
        with pytest.raises(NotEvaluable, match="uint64"):
            evaluate(op, first, second)
        return
    expected = [oracle(one, two) for one, two in zip(first.tolist(), second.tolist())]
    if "cdiv" in text:  # its sum wraps before it is divided
        fits = [torch.iinfo(dtype).max - 7 >= one for one in first.tolist()]
        first, second = first[fits], second[fits]
        expected = [value for value, fit in zip(expected, fits) if fit]
    _check(evaluate(op, first, second), dtype, expected)


@pytest.mark.parametrize("number", range(len(INTEGERS)), ids=[text for text, _ in INTEGERS])
def test_the_interpreter_gives_the_same_int32(integer_module: ModuleType, number: int) -> None:
    op = op_of(getattr(integer_module, f"f{number}"))
    first, second = samples(torch.int32, seed=number, count=60)
    assert torch.equal(evaluate(op, first, second), interpreted(op, first, second))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64], ids=str)
def test_upper_half_of_a_product(dtype: torch.dtype, tmp_path: Path) -> None:
    op = op_of(module_of(tmp_path, ["tl.umulhi(a, b)"]).f0)
    first, second = samples(dtype, seed=2, count=500)
    bits = 8 * dtype.itemsize
    pairs = zip(first.tolist(), second.tolist())
    _check(evaluate(op, first, second), dtype, [(a % 2**bits) * (b % 2**bits) >> bits for a, b in pairs])


FLOAT_OF = {tl.float32: np.float32, tl.float64: np.float64}


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_conversions(dtype: torch.dtype, tmp_path: Path) -> None:
    """Between integers, to and from floats, through bits: by NumPy, whose casts are those of C."""
    kind = str(dtype).removeprefix("torch.")
    targets = [str(each).removeprefix("torch.") for each in (*SIGNED, *UNSIGNED)]
    texts = [f"a.to(tl.{target}).to(tl.{kind})" for target in targets]
    texts += [f"a.to(tl.{target}).to(tl.float64, bitcast=False) * 1.0" for target in targets]
    module = module_of(tmp_path, [*texts, f"a.to(tl.{kind}) / 1", "a.to(tl.float64) + a.to(tl.float32)"])
    first, _ = samples(dtype, seed=4, count=100)
    array = first.numpy()
    for number, target in enumerate(targets):
        narrow = array.astype(target)
        found = evaluate(op_of(getattr(module, f"f{number}")), first, first)
        assert np.array_equal(found.numpy(), narrow.astype(kind)), target
        floats = torch.zeros(first.shape, dtype=torch.float64)
        wide = _evaluate_as(module, f"f{number + len(targets)}", first, floats)
        assert np.array_equal(wide.numpy(), narrow.astype(np.float64)), target
    quotient = _evaluate_as(module, f"f{2 * len(targets)}", first, torch.zeros(first.shape))
    assert np.array_equal(quotient.numpy(), array.astype(np.float32))
    both = _evaluate_as(module, f"f{2 * len(targets) + 1}", first, torch.zeros(first.shape, dtype=torch.float64))
    assert np.array_equal(both.numpy(), array.astype(np.float64) + array.astype(np.float32).astype(np.float64))


def _evaluate_as(module: ModuleType, name: str, operand: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The function's value in the type that it has, which must be that of ``like``."""
    found: torch.Tensor = twin_of(getattr(module, name))(_wrapped(operand), _wrapped(operand)).tensor
    assert found.dtype == like.dtype
    return found


@pytest.mark.parametrize("target", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_floats_become_integers_towards_zero(target: str, tmp_path: Path) -> None:
    module = module_of(tmp_path, [f"a.to(tl.{target}).to(tl.float64)"])
    limits = np.iinfo(target)
    values = [0.0, 0.9, 1.0, 100.7, -0.9] + ([-1.0, -100.7] if limits.min else [])
    values += [
        float(limits.max // 2) + 1.0,
        float(limits.max // 4 * 3 - 2047) if limits.bits == 64 else limits.max - 0.5,
    ]
    operand = torch.tensor(values, dtype=torch.float64)
    assert evaluate(op_of(module.f0), operand, operand).tolist() == [float(int(value)) for value in values]


PROMOTED = [
    ("a + 1.5", torch.int32, torch.float32),
    ("a + 1", torch.int8, torch.int8),
    ("a * 2", torch.uint16, torch.uint16),
    ("(a > 1) + 1", torch.int64, torch.int32),
    ("a + b.to(tl.float16)", torch.bfloat16, torch.float16),
    ("a + b.to(tl.float32)", torch.bfloat16, torch.float32),
    ("a / b", torch.bfloat16, torch.float32),
    ("a / b", torch.int64, torch.float32),
    ("a + b.to(tl.uint32)", torch.int32, torch.uint32),
    ("a + b.to(tl.uint32)", torch.int64, torch.int64),
    ("a + b.to(tl.int8)", torch.uint8, torch.uint8),
    ("a * b.to(tl.float64)", torch.int64, torch.float64),
    ("tl.where(a > b, a, 1.5)", torch.int16, torch.float32),
    ("tl.where(a > b, 1, 2.0)", torch.int16, torch.float32),
    ("tl.clamp(a, 0, 2.5)", torch.int16, torch.float32),
    ("tl.full(a.shape, 3, tl.uint8)", torch.int16, torch.uint8),
    ("a > b", torch.float32, torch.bool),
]


@pytest.mark.parametrize(("text", "dtype", "expected"), PROMOTED)
def test_types_of_results(text: str, dtype: torch.dtype, expected: torch.dtype, tmp_path: Path) -> None:
    operand = torch.tensor([1, 2, 3]).to(dtype)
    found = twin_of(module_of(tmp_path, [text]).f0)(_wrapped(operand), _wrapped(operand))
    kind = "int1" if expected == torch.bool else str(expected).removeprefix("torch.")
    assert found.dtype is getattr(tl, kind)


@pytest.mark.parametrize(
    "text",
    ["a - (-1)", "a + 70000", "a // 2.0", "a & 1.5", "~(a * 1.5)", "a.to(tl.int8, bitcast=True)", "a % b.to(tl.int16)"],
)
def test_what_triton_refuses_is_not_evaluated(text: str, tmp_path: Path) -> None:
    operand = torch.tensor([1, 2, 3]).to(torch.uint16)
    with pytest.raises(NotEvaluable, match=r"^(TypeError|ValueError): "):
        evaluate(op_of(module_of(tmp_path, [text]).f0), operand, operand)


def test_the_most_negative_number_divided_by_minus_one(tmp_path: Path) -> None:
    """torch kills the process there: the quotient does not fit, and the processor traps."""
    module = module_of(tmp_path, ["a // b", "a % b"])
    for dtype in SIGNED:
        lowest = torch.full((67,), torch.iinfo(dtype).min, dtype=dtype)
        ones = torch.full((67,), -1, dtype=dtype)
        assert torch.equal(evaluate(op_of(module.f0), lowest, ones), lowest)
        assert torch.equal(evaluate(op_of(module.f1), lowest, ones), torch.zeros_like(lowest))
        for function in (module.f0, module.f1):  # of any value, as on a GPU, and no error
            assert evaluate(op_of(function), ones, torch.zeros_like(ones)).shape == ones.shape

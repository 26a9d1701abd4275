"""The functions of ``triton.language`` on torch tensors, against NumPy, Python and the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from microddp_kernels.evaluate import NotEvaluable
from microddp_kernels.evaluate.functions import FUNCTIONS
from microddp_kernels.evaluate.names import FALLS_BACK, NOT_ELEMENTWISE
from microddp_kernels.evaluate.value import Value
from tests.kernels.evaluate_tools import (
    check_floats,
    each_of,
    evaluate,
    function_of,
    interpreted,
    module_of,
    op_of,
    samples,
    widened,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
ALL_NAN = "propagate_nan=tl.PropagateNan.ALL"


def test_every_public_name_of_triton_is_mapped_refused_or_left_to_the_interpreter() -> None:
    functions = [name for name in dir(tl) if not name.startswith("_") and callable(getattr(tl, name))]
    assert len(functions) > 100
    names = [name for name in functions if not isinstance(getattr(tl, name), tl.dtype)]
    assert [name for name in names if name not in FUNCTIONS.keys() | NOT_ELEMENTWISE.keys() | FALLS_BACK] == []
    assert FUNCTIONS.keys() & NOT_ELEMENTWISE.keys() == FUNCTIONS.keys() & FALLS_BACK == set()
    methods = [name for name in dir(tl.tensor) if not name.startswith("_")]
    assert [name for name in methods if not hasattr(Value, name) and name not in NOT_ELEMENTWISE] == []


def _larger(first: Any, second: Any) -> Any:
    """The number beside a NaN, and the positive one of two zeros."""
    takes_first = np.isnan(second) | (first > second) | (first == second) & np.signbit(second)
    return np.where(takes_first, first, second)


def _smaller(first: Any, second: Any) -> Any:
    return -_larger(-first, -second)


def _with_nan(select: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, select(a, b))


# An expression, what it is in NumPy, and how many floats it may be away, in float32 and in float64.
FLOATS: list[tuple[str, Callable[[Any, Any], Any], int, int]] = [
    ("a + b", np.add, 0, 0),
    ("a - b", np.subtract, 0, 0),
    ("a * b", np.multiply, 0, 0),
    ("a / b", np.divide, 0, 0),
    ("1 / a", lambda a, b: 1 / a, 0, 0),
    ("3 - a * 2", lambda a, b: 3 - a * 2, 0, 0),
    ("a % b", np.fmod, 0, 0),
    ("-a", lambda a, b: -a, 0, 0),
    ("tl.add(a, b) * 2", lambda a, b: (a + b) * 2, 0, 0),
    ("tl.sub(a, b)", np.subtract, 0, 0),
    ("tl.mul(a, b)", np.multiply, 0, 0),
    ("tl.abs(a)", lambda a, b: np.abs(a), 0, 0),
    ("a.abs()", lambda a, b: np.abs(a), 0, 0),
    ("tl.maximum(a, b)", _larger, 0, 0),
    ("tl.minimum(a, b)", _smaller, 0, 0),
    (f"tl.maximum(a, b, {ALL_NAN})", _with_nan(_larger), 0, 0),
    (f"tl.minimum(a, b, {ALL_NAN})", _with_nan(_smaller), 0, 0),
    ("tl.maximum(a, 1.5)", lambda a, b: _larger(a, np.full_like(a, 1.5)), 0, 0),
    ("max(a, b)", _larger, 0, 0),
    ("min(a, b, 2)", lambda a, b: _smaller(_smaller(a, b), np.full_like(a, 2)), 0, 0),
    ("tl.clamp(a, -1, 2.5)", lambda a, b: np.where(np.isnan(a), -1, np.clip(a, -1, 2.5)), 0, 0),
    (f"tl.clamp(a, -1.0, 2.5, {ALL_NAN})", lambda a, b: np.clip(a, -1, 2.5), 0, 0),
    ("tl.where(a > b, a, b)", lambda a, b: np.where(a > b, a, b), 0, 0),
    ("tl.where(a == b, 1.0, a)", lambda a, b: np.where(a == b, 1.0, a), 0, 0),
    ("tl.where((a != b) & ~(a <= 0), 1, b)", lambda a, b: np.where((a != b) & ~(a <= 0), 1.0, b), 0, 0),
    ("tl.where((a >= b) | (a < b), 1, 0) + a", lambda a, b: a + ((a >= b) | (a < b)), 0, 0),
    ("tl.floor(a) + tl.ceil(b)", lambda a, b: np.floor(a) + np.ceil(b), 0, 0),
    ("tl.sqrt(a)", lambda a, b: np.sqrt(a), 1, 1),
    ("tl.fdiv(a, b)", np.divide, 0, 0),
    ("tl.fdiv(a, b, ieee_rounding=True)", np.divide, 0, 0),
    ("tl.exp(a)", lambda a, b: np.exp(a), 1, 2),
    ("tl.exp2(a)", lambda a, b: np.exp2(a), 1, 2),
    ("tl.log(a)", lambda a, b: np.log(a), 1, 2),
    ("tl.log2(a)", lambda a, b: np.log2(a), 1, 2),
    ("tl.sin(a)", lambda a, b: np.sin(a), 1, 2),
    ("a.cos()", lambda a, b: np.cos(a), 1, 2),
    ("tl.rsqrt(a)", lambda a, b: 1 / np.sqrt(a), 2, 2),
    ("tl.erf(a)", lambda a, b: each_of(math.erf)(a), 2, 3),
    ("tl.sigmoid(a)", lambda a, b: 1 / (1 + np.exp(-a)), 3, 4),
    ("tl.full(a.shape, 2, a.dtype) * a + tl.zeros(a.shape, a.dtype)", lambda a, b: 2 * a + 0.0, 0, 0),
    ("tl.zeros_like(a) + b", lambda a, b: b + 0.0, 0, 0),
    ("tl.cast(a.to(tl.float64), a.dtype)", lambda a, b: a, 0, 0),
    ("tl.multiple_of(a, 1) + tl.broadcast(a, b)[1]", np.add, 0, 0),
    ("a.to(a.dtype, bitcast=True)", lambda a, b: a, 0, 0),
]


@pytest.fixture(scope="module")
def float_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return module_of(tmp_path_factory.mktemp("floats"), [text for text, *_ in FLOATS])


@pytest.mark.parametrize("number", range(len(FLOATS)), ids=[text for text, *_ in FLOATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats(float_module: ModuleType, number: int, dtype: torch.dtype) -> None:
    text, oracle, *ulps = FLOATS[number]
    op = op_of(getattr(float_module, f"f{number}"))
    first, second = samples(dtype, seed=number)
    with np.errstate(all="ignore"):
        expected = oracle(*widened(first.numpy(), second.numpy()))
    found = evaluate(op, first, second)
    assert isinstance(found, torch.Tensor) and found.dtype == dtype
    check_floats(found, expected, ulps[dtype == torch.float64])
    if not text.startswith(("max", "min")):  # which the interpreter gets wrong: it compares by truth
        by_interpreter = interpreted(op, first, second)
        is_exact = "tl.max" in text or "tl.min" in text or "clamp" in text
        at_most = ulps[dtype == torch.float64] + (not is_exact)
        check_floats(found, by_interpreter.double().numpy(), at_most, is_signed=is_exact)


def _nearest_float32(exact: Fraction) -> float:
    """The nearest float32, ties to even, chosen among the neighbours of a guess by exact distances."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return float(min(around, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.uint32)) & 1)))


@pytest.mark.parametrize("text", ["tl.fma(a, a, b)", "libdevice.fma(a, a, b)", "tl.math.fma(a, a, 1.0)"])
def test_fma_rounds_once(text: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    scales = 2.0 ** random.integers(-70, 60, (2, 3000))
    first, second = torch.from_numpy((random.standard_normal((2, 3000)) * scales).astype(np.float32))
    # The square is in the middle between two float32; what is added decides, and is lost in float64.
    middle = [1 + 2.0**-12, -1 - 2.0**-12, 1 + 2.0**-12, 1 + 3 * 2.0**-12, 1 + 3 * 2.0**-12]
    first = torch.cat([first, torch.tensor([*middle, 2.0**-75, 3.0e38])])
    second = torch.cat([second, torch.tensor([2.0**-80, 2.0**-80, -(2.0**-80), -(2.0**-80), 2.0**-80, 1.0, 2.0])])
    found = function_of(text, tmp_path)(first, second)
    for one, two, result in zip(first.tolist(), second.tolist(), found.tolist()):
        exact = Fraction(one) ** 2 + Fraction(1.0 if "1.0" in text else two)
        expected = _nearest_float32(exact) if abs(exact) < 2**128 else math.copysign(math.inf, exact)
        assert result == expected, (one, two)
    special = torch.tensor([math.nan, math.inf, math.inf, 0.0])
    addends = torch.tensor([1.0, math.inf, -math.inf, 0.0])
    is_nan = [True, False, "1.0" not in text, False]
    assert function_of(text, tmp_path)(special, addends).isnan().tolist() == is_nan


def test_float32_alone(tmp_path: Path) -> None:
    first, second = samples(torch.float32, seed=1)
    with np.errstate(all="ignore"):
        check_floats(function_of("tl.div_rn(a, b)", tmp_path)(first, second), np.divide(*widened(first, second)), 0)
        check_floats(function_of("tl.sqrt_rn(a)", tmp_path)(first, second), np.sqrt(*widened(first)), 0)
    for text in ("tl.div_rn(a, b)", "tl.sqrt_rn(a)", "tl.fma(a, b, b)"):
        with pytest.raises(NotEvaluable):
            function_of(text, tmp_path)(first.double(), second.double())


def test_what_is_not_mapped_is_named(tmp_path: Path) -> None:
    one = torch.ones(2)
    for text, named in (
        ("tl.map_elementwise(tl.add, a, b)", "map_elementwise"),
        ("libdevice.tgamma(a)", "libdevice.tgamma"),
        ("a.to(tl.float8e5)", "conversion to fp8e5"),
        ("a[:, None]", "index into a tensor"),
        ("abs(a)", "abs"),
        ("a ** 2", r"\*\*"),
    ):
        with pytest.raises(NotEvaluable, match=named):
            function_of(text, tmp_path)(one, one)

"""CUDA's libdevice functions on torch tensors, against NumPy and values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.extra import libdevice

from microddp_kernels.evaluate.libdevice import LIBDEVICE
from microddp_kernels.evaluate.value import Value
from tests.kernels.evaluate_tools import (
    check_floats,
    each_of,
    evaluate,
    function_of,
    module_of,
    op_of,
    samples,
    widened,
)

pytestmark = pytest.mark.timeout(60)

LIBRARY: dict[str, tuple[Callable[..., Any], int]] = {
    "abs": (np.abs, 0),
    "acos": (np.arccos, 2),
    "acosh": (np.arccosh, 3),
    "add_rn": (np.add, 0),
    "asin": (np.arcsin, 2),
    "asinh": (np.arcsinh, 3),
    "atan": (np.arctan, 2),
    "atan2": (np.arctan2, 3),
    "atanh": (np.arctanh, 3),
    "cbrt": (np.cbrt, 1),
    "ceil": (np.ceil, 0),
    "copysign": (np.copysign, 0),
    "cos": (np.cos, 2),
    "cosh": (np.cosh, 2),
    "div_rn": (np.divide, 0),
    "erf": (each_of(math.erf), 3),
    "erfc": (each_of(math.erfc), 8),
    "exp": (np.exp, 2),
    "exp10": (lambda x: 10.0**x, 2),
    "exp2": (np.exp2, 2),
    "expm1": (np.expm1, 2),
    "fdim": (lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.where(x > y, x - y, 0.0)), 0),
    "floor": (np.floor, 0),
    "fmod": (np.fmod, 0),
    "hypot": (np.hypot, 2),
    "log": (np.log, 2),
    "log10": (np.log10, 2),
    "log1p": (np.log1p, 2),
    "log2": (np.log2, 2),
    "mul_rn": (np.multiply, 0),
    "nearbyint": (np.rint, 0),
    "normcdf": (lambda x: each_of(math.erfc)(-x / math.sqrt(2)) / 2, 40),
    "pow": (np.power, 2),
    "rcp_rn": (np.reciprocal, 0),
    "rint": (np.rint, 0),
    "round": (lambda x: np.where(np.abs(x % 1) == 0.5, np.trunc(x) + np.copysign(1, x), np.rint(x)), 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2),
    "sin": (np.sin, 2),
    "sinh": (np.sinh, 2),
    "sqrt": (np.sqrt, 0),
    "sqrt_rn": (np.sqrt, 0),
    "sub_rn": (np.subtract, 0),
    "tan": (np.tan, 3),
    "tanh": (np.tanh, 3),
    "trunc": (np.trunc, 0),
}


@pytest.fixture(scope="module")
def library_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    calls = [f"libdevice.{name}({'a, b' if _takes_two(name) else 'a'})" for name in LIBRARY]
    return module_of(tmp_path_factory.mktemp("library"), calls)


def _takes_two(name: str) -> bool:
    code = getattr(libdevice, name).__code__
    return bool(code.co_argcount == 2)


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_library(library_module: ModuleType, name: str, dtype: torch.dtype) -> None:
    oracle, ulps = LIBRARY[name]
    first, second = samples(dtype, seed=5)
    if name in ("pow", "exp10", "erfc", "normcdf"):  # of large operands NumPy is no closer than what is tested
        first = torch.where(first.abs() < 20, first, first.sign())
    with np.errstate(all="ignore"):
        expected = oracle(*widened(first.numpy(), second.numpy())[: 1 + _takes_two(name)])
    found = evaluate(op_of(getattr(library_module, f"f{list(LIBRARY).index(name)}")), first, second)
    assert isinstance(found, torch.Tensor) and found.dtype == dtype
    check_floats(found, expected, ulps if dtype == torch.float64 else min(ulps, 3))


def test_every_function_of_the_library_exists_there_and_runs() -> None:
    assert [name for name in LIBDEVICE if not hasattr(libdevice, name)] == []
    assert [name for name in LIBRARY if name not in LIBDEVICE] == []
    values = torch.tensor([0.25, 0.5])
    for name, function in LIBDEVICE.items():
        dtype, kind = (torch.float64, tl.float64) if name == "isfinited" else (torch.float32, tl.float32)
        operands = [Value(values.to(dtype), kind)] * getattr(libdevice, name).__code__.co_argcount
        if name in ("ldexp", "scalbn"):
            operands[1] = Value(torch.tensor([1, 2], dtype=torch.int32), tl.int32)
        assert name == "acosh" or function(*operands).tensor.isfinite().all(), name
        with pytest.raises(TypeError, match="takes"):
            function(*(Value(torch.tensor([1, 2]), tl.int64) for _ in operands))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libdevice.isnan(a).to(tl.float32)", [1, 0, 0, 0, 0, 0]),
        ("libdevice.isinf(a).to(tl.float32)", [0, 1, 1, 0, 0, 0]),
        ("libdevice.finitef(a) * 2.0", [0, 0, 0, 2, 2, 2]),
        ("libdevice.signbit(b).to(tl.float32)", [0, 0, 1, 0, 1, 1]),
        ("libdevice.ldexp(b, 3)", [math.inf, math.inf, -math.inf, 8, -20, -0.0]),
        ("libdevice.pow(b, 3)", [math.inf, math.inf, -math.inf, 1, -15.625, -0.0]),
        ("libdevice.saturatef(a)", [0, 1, 0, 0, 0.5, 1]),
        ("libdevice.sinpi(b)", [math.nan, math.nan, math.nan, 0, -1, 0]),
        ("libdevice.norm3d(b, a, a)", [math.inf, math.inf, math.inf, 1, math.sqrt(6.75), math.sqrt(8)]),
    ],
)
def test_library_by_hand(text: str, expected: list[float], tmp_path: Path) -> None:
    first = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.5, 2.0])
    second = torch.tensor([math.inf, math.inf, -math.inf, 1.0, -2.5, -0.0])
    found = function_of(text, tmp_path)(first, second)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), equal_nan=True, rtol=2e-7, atol=1e-7)

"""Evaluating expressions of ``triton.language``: jitted functions made of their texts, operands, comparisons."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from microddp_kernels import CombineSpec, Lane, ReduceOp
from microddp_kernels.evaluate import evaluated
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from tests.kernels.oracle import Array, special_pairs

_HEAD = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
_numbers = itertools.count()
EVERY = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


def module_of(folder: Path, expressions: Sequence[str]) -> ModuleType:
    """A module with a jitted function of ``a`` and ``b`` for each expression: ``f0``, ``f1``, ..."""
    functions = [
        f"\n\n@triton.jit\ndef f{number}(a, b):\n    return {text}\n" for number, text in enumerate(expressions)
    ]
    path = folder / f"expressions{next(_numbers)}.py"
    path.write_text(_HEAD + "".join(functions), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def op_of(function: Any, **declared: Any) -> ReduceOp:
    """An operator of any types, without the checks of ``reduce_op``."""
    return ReduceOp(getattr(function, "__name__", "op"), function, None, EVERY, **declared)


def lanes_op(function: Any, *names: str, wide: Sequence[str] = ()) -> ReduceOp:
    """One of several lanes."""
    return op_of(function, lanes=tuple(Lane(name, EVERY, name in wide) for name in names))


def evaluate(op: ReduceOp, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """What the evaluated body makes of two operands of one lane."""
    found = evaluated(op).combine(first, second)
    assert isinstance(found, torch.Tensor)
    return found


def interpreted(op: ReduceOp, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """What the interpreter launcher makes of two operands."""
    out = torch.empty_like(first)
    InterpreterLauncher(block=256).combine(out, [first, second], CombineSpec(op))
    return out


def samples(dtype: torch.dtype, seed: int, count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of every pair of special values, and random ones: floats of all sizes up to 2**20."""
    first, second = special_pairs(dtype)
    random = np.random.default_rng(seed)
    if dtype.is_floating_point:
        size = (2, count)
        values = torch.from_numpy(random.standard_normal(size) * 2.0 ** random.integers(-20, 20, size)).to(dtype)
    else:
        values = torch.from_numpy(random.integers(0, 256, (2, count * dtype.itemsize), dtype=np.uint8)).view(dtype)
    return torch.cat([first, values[0]]), torch.cat([second, values[1]])


def ulps_apart(actual: torch.Tensor, expected: torch.Tensor) -> Array:
    """How many floats lie between, NaN beside NaN counting as 0, and anything else beside NaN as very many."""
    distances = np.abs(_ordered(actual) - _ordered(expected))
    both, one = torch.isnan(actual) & torch.isnan(expected), torch.isnan(actual) ^ torch.isnan(expected)
    return np.where(both.numpy(), 0, np.where(one.numpy(), 2**62, distances))


def _ordered(tensor: torch.Tensor) -> Array:
    """Integers in the order of the floats; both zeros are 0."""
    bits = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int64).numpy().astype(object)
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return np.where(bits < 0, lowest - bits, bits).astype(np.float64)


def is_negative(tensor: torch.Tensor) -> torch.Tensor:
    return torch.signbit(tensor) & ~torch.isnan(tensor)


def check_floats(actual: torch.Tensor, expected: Any, ulps: int, is_signed: bool = True) -> None:
    wanted = torch.from_numpy(np.ascontiguousarray(expected, np.float64)).to(actual.dtype)
    apart = ulps_apart(actual, wanted)
    where = np.flatnonzero(apart > ulps)[:4]
    assert not where.size, f"at {where}: {actual[where]}, not {wanted[where]}, {apart.max()} ulps"
    if is_signed:
        assert torch.equal(is_negative(actual), is_negative(wanted)), "signs of zeros differ"


def widened(*arrays: Any) -> list[Any]:
    return [np.asarray(each, np.float64) for each in arrays]


def each_of(function: Callable[..., float]) -> Callable[..., Any]:
    """A function of Python's ``math`` on arrays."""

    def apply(*arrays: Any) -> Any:
        return np.array([_or_nan(function, *map(float, values)) for values in zip(*arrays)])

    return apply


def _or_nan(function: Callable[..., float], *values: float) -> float:
    try:
        return function(*values)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def function_of(text: str, tmp_path: Path) -> Any:
    return evaluated(op_of(module_of(tmp_path, [text]).f0)).combine

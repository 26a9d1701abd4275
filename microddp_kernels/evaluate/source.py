"""The Python function behind a ``@triton.jit`` function, its source, and what the names in it stand for.

Nothing here imports Triton: a jitted function brings it along.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Mapping
from functools import cache
from typing import Any

from microddp_kernels.reduce_op import KernelFunction

__all__ = ["function_tree", "is_jitted", "names_of", "python_function", "source_of"]


@cache
def _jit_classes() -> tuple[type, ...]:
    """The two forms of a ``@triton.jit`` function: which one it takes depends on the environment at its definition."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ModuleNotFoundError:
        return ()
    return JITFunction, InterpretedFunction


def is_jitted(function: Any) -> bool:
    """Whether ``function`` is what ``@triton.jit`` makes, whichever form that takes."""
    return isinstance(function, _jit_classes())


def python_function(function: Any) -> types.FunctionType:
    """The Python function of a ``@triton.jit`` function, or of a ``KernelFunction`` naming one.

    Raises:
        TypeError: it is neither.
    """
    loaded = function.load() if isinstance(function, KernelFunction) else function
    if not is_jitted(loaded):
        raise TypeError(f"{loaded!r} is not a @triton.jit function")
    found: types.FunctionType = loaded.fn
    return found


def source_of(function: types.FunctionType) -> str:
    """The source from ``def`` on. Raises ValueError if there is none, as for a function made by ``exec``."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of {function.__qualname__} of {function.__module__} cannot be found") from error
    lines = text.splitlines(keepends=True)
    start = next((number for number, line in enumerate(lines) if line.startswith("def ")), 0)
    return "".join(lines[start:])


def function_tree(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, without its decorators. Raises ValueError as ``source_of`` does."""
    tree = ast.parse(source_of(function)).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise ValueError(f"{function.__qualname__} of {function.__module__} is not defined by def")
    return tree


def names_of(function: types.FunctionType) -> Mapping[str, Any]:
    """What the names that are not local to ``function`` stand for: its closure, then its globals."""
    enclosed = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            enclosed[name] = cell.cell_contents
        except ValueError:  # a name of the enclosing function that is assigned later
            continue
    return {**function.__globals__, **enclosed}

"""A short number that tells operators of one name apart, the same in every process that has the same source."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

from microddp_kernels.evaluate.source import function_tree, is_jitted, source_of
from microddp_kernels.validate_names import OfLanguage, used_names

__all__ = ["fingerprint"]

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(functions: Sequence[Any], torch_functions: Sequence[Any], laws: Any) -> str:
    """Eight hexadecimal digits of a hash.

    Args:
        functions: ``@triton.jit`` functions or None. Their source counts, that of the jitted functions that they name,
            the constants among their globals, and the defaults of their parameters.
        torch_functions: Python functions or None; their own source counts, and the numbers and texts among their
            globals and in their closures.
        laws: what is declared; its text counts.
    """
    hashed = hashlib.sha256(repr(laws).encode())
    seen: set[types.FunctionType] = set()
    for function in functions:
        for part in _parts(function.fn, seen) if function is not None else ("no function",):
            hashed.update(part.encode() + b"\0")
    for function in torch_functions:
        for part in _python_parts(function):
            hashed.update(part.encode() + b"\0")
    return hashed.hexdigest()[:8]


def _parts(function: types.FunctionType, seen: set[types.FunctionType]) -> Iterator[str]:
    if function in seen:
        return
    seen.add(function)
    yield source_of(function)
    yield from _defaults(function)
    for node, value in used_names(function, function_tree(function)):
        name = getattr(node, "id", getattr(node, "attr", ""))
        if is_jitted(value) or _is_constexpr_function(value):
            if not str(value.fn.__module__).startswith("triton."):
                yield from _parts(value.fn, seen)
        elif not isinstance(value, (OfLanguage, types.ModuleType)):
            yield f"{name} = {_text(value)}"


def _is_constexpr_function(value: Any) -> bool:
    from triton.runtime.jit import ConstexprFunction  # Triton is there if a function is jitted

    return isinstance(value, ConstexprFunction)


def _defaults(function: types.FunctionType) -> Iterator[str]:
    for values in (function.__defaults__ or (), (function.__kwdefaults__ or {}).values()):
        yield ", ".join(map(_text, values))


def _text(value: Any) -> str:
    """The same in every process: no address of an object."""
    import triton.language as tl

    value = value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, (*_PLAIN, tl.dtype, Enum)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _python_parts(function: Any) -> Iterator[str]:
    """What can be told of a Python function without knowing what it calls."""
    if function is None:
        yield "no function"
        return
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):
        yield f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if isinstance(function, types.FunctionType):
        yield from _defaults(function)
        found = inspect.getclosurevars(function)
        for name, value in sorted({**found.globals, **found.nonlocals}.items()):
            if isinstance(value, _PLAIN):
                yield f"{name} = {value!r}"

"""A short number that tells operators of one name apart, the same in every process that has the same source."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from microddp_kernels.evaluate.source import function_tree, is_jitted, source_of
from microddp_kernels.validate_names import OfLanguage, used_names

__all__ = ["fingerprint"]


def fingerprint(functions: Sequence[Any], torch_functions: Sequence[Any], laws: Any) -> str:
    """Eight hexadecimal digits of a hash.

    Args:
        functions: ``@triton.jit`` functions or None. Their source counts, that of the jitted functions that they name,
            and the constants among their globals.
        torch_functions: Python functions or None; their own source counts.
        laws: what is declared; its text counts.
    """
    hashed = hashlib.sha256(repr(laws).encode())
    seen: set[types.FunctionType] = set()
    for function in functions:
        for part in _parts(function.fn, seen) if function is not None else ("no function",):
            hashed.update(part.encode() + b"\0")
    for function in torch_functions:
        hashed.update(_python_source(function).encode() + b"\0")
    return hashed.hexdigest()[:8]


def _parts(function: types.FunctionType, seen: set[types.FunctionType]) -> Iterator[str]:
    if function in seen:
        return
    seen.add(function)
    yield source_of(function)
    for node, value in used_names(function, function_tree(function)):
        if is_jitted(value):
            if not str(value.fn.__module__).startswith("triton."):
                yield from _parts(value.fn, seen)
        elif not isinstance(value, (OfLanguage, types.ModuleType)) and not callable(value):
            yield f"{getattr(node, 'id', getattr(node, 'attr', ''))} = {value!r}"


def _python_source(function: Any) -> str:
    if function is None:
        return "no function"
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"

"""The twin of a ``@triton.jit`` function: its body as Python code on ``Value``, made once.

Names are replaced in the twin's own globals, so that no module is patched and any number of threads may run it.
"""

from __future__ import annotations

import ast
import builtins
import threading
import types
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from microddp_kernels.evaluate.errors import NotEvaluable
from microddp_kernels.evaluate.functions import FUNCTIONS, dynamic_range
from microddp_kernels.evaluate.libdevice import LIBDEVICE
from microddp_kernels.evaluate.rewrite import HELPERS, rewritten
from microddp_kernels.evaluate.source import function_tree, is_jitted, names_of, python_function
from microddp_kernels.evaluate.value import Value

__all__ = ["twin_of"]

_LANGUAGE: Final = "triton.language"

_twins: WeakKeyDictionary[types.FunctionType, Callable[..., Any]] = WeakKeyDictionary()
_lock = threading.RLock()
_in_progress: list[types.FunctionType] = []


def twin_of(function: Any) -> Callable[..., Any]:
    """The twin of a ``@triton.jit`` function; it takes and returns values (and Python numbers).

    Raises:
        NotEvaluable: it has none.
    """
    original = python_function(function)
    with _lock:
        twin = _twins.get(original)
        if twin is None:
            if original in _in_progress:
                raise NotEvaluable(f"{original.__name__}, which calls itself")
            _in_progress.append(original)
            try:
                twin = _twins[original] = _make(original)
            finally:
                _in_progress.pop()
        return twin


def _make(original: types.FunctionType) -> Callable[..., Any]:
    try:
        tree = function_tree(original)
    except ValueError as error:
        raise NotEvaluable(str(error)) from error
    name = tree.name
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    module = ast.fix_missing_locations(ast.Module([rewritten(tree)], []))
    known = names_of(original)
    scope: dict[str, Any] = dict(HELPERS)
    scope["__builtins__"] = {}
    scope |= {each: _replaced(known[each]) for each in used if each in known}
    for each in used - known.keys():
        if each in _BUILTINS:
            scope[each] = _BUILTINS[each]
    exec(compile(module, original.__code__.co_filename, "exec"), scope)
    twin: types.FunctionType = scope.pop(name)
    twin.__defaults__ = tuple(map(_replaced, original.__defaults__)) if original.__defaults__ else None
    twin.__kwdefaults__ = {key: _replaced(value) for key, value in (original.__kwdefaults__ or {}).items()}
    if name in known and name in used:
        scope[name] = _replaced(known[name])
    return twin


class _Namespace:
    """A module whose attributes are replaced when they are first asked for."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        module = self._module
        if _is_language(module.__name__):
            found = _of_language(module.__name__, name, getattr(module, name, None))
        else:
            found = _replaced(getattr(module, name))
        setattr(self, name, found)
        return found


def _is_language(module: str) -> bool:
    return module == _LANGUAGE or module.startswith(_LANGUAGE + ".")


def _of_language(module: str, name: str, original: Any) -> Any:
    """What stands for an attribute of ``triton.language`` or a module of it.

    Functions go by name: while the interpreter runs in another thread, the attributes themselves are replaced.
    """
    if isinstance(original, types.ModuleType):
        return _Namespace(original)
    table = LIBDEVICE if module.endswith(".libdevice") else FUNCTIONS
    if name in table:
        return table[name]
    from triton.language import dtype

    if isinstance(original, (dtype, int, float, str)):
        return original
    raise NotEvaluable(f"{module.removeprefix('triton.language.extra.')}.{name}")


def _replaced(value: Any) -> Any:
    """What stands for a global of the original in its twin; what has no torch form raises when it is called."""
    from triton.language import constexpr
    from triton.runtime.jit import ConstexprFunction

    if isinstance(value, constexpr):
        return value.value
    if isinstance(value, types.ModuleType):
        return _Namespace(value)
    function = value.fn if is_jitted(value) else value
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if isinstance(module, str) and _is_language(module) and callable(value):
        return _postponed(_of_language, module, name, value)
    if is_jitted(value):
        return _postponed(twin_of, value)
    if isinstance(value, ConstexprFunction):
        return value.fn
    return value


def _postponed(make: Callable[..., Any], *arguments: Any) -> Any:
    """``make(*arguments)``, or if that is not evaluable, a function that says so when it is called.

    A function may name what it does not use for the types at hand.
    """
    try:
        return make(*arguments)
    except NotEvaluable as error:
        reason = str(error)

    def refuse(*ignored: Any, **options: Any) -> Any:
        raise NotEvaluable(reason)

    return refuse


def _extreme(name: str) -> Callable[..., Any]:
    """``min`` and ``max`` of Python, which Triton knows for constants and for tensors."""

    def function(*operands: Any) -> Any:
        if not any(each.__class__ is Value for each in operands):
            return getattr(builtins, name)(*operands)
        result = operands[0]
        for each in operands[1:]:
            result = FUNCTIONS["minimum" if name == "min" else "maximum"](result, each)
        return result

    return function


_BUILTINS: Final[dict[str, Any]] = {
    "float": float,
    "getattr": getattr,
    "hasattr": hasattr,
    "int": int,
    "isinstance": isinstance,
    "len": len,
    "list": list,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "range": dynamic_range,
}
"""What Triton knows of Python's built-in functions."""

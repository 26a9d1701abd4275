"""The twin of a ``@triton.jit`` function: its body as Python code on ``Value``, made once.

Names are replaced in the twin's own globals, so that no module is patched and any number of threads may run it. The
syntax tree is changed where Python and Triton differ: a number that a variable takes gets a type; ``and``, ``or``,
``not`` and chained comparisons work on tensors; ``assert`` is for debugging.
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
from microddp_kernels.evaluate.source import function_tree, is_jitted, names_of, python_function
from microddp_kernels.evaluate.value import Value, as_value

__all__ = ["twin_of"]

_PREFIX: Final = "__evaluate_"
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
    module = ast.fix_missing_locations(ast.Module([_Rewriter().rewritten(tree)], []))
    known = names_of(original)
    scope: dict[str, Any] = dict(_HELPERS)
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
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
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


class _Rewriter(ast.NodeTransformer):
    """Changes a function where Python would do something else than Triton."""

    def rewritten(self, tree: ast.FunctionDef) -> ast.FunctionDef:
        tree.decorator_list = []
        tree.returns = None
        arguments = tree.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                each.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]  # the original's are put in their place
        arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
        tree.body = [self.visit(statement) for statement in tree.body]
        return tree

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("settled", node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node.value is None:
            return ast.Pass()
        is_constant = ast.unparse(node.annotation).strip("'\"").split(".")[-1] == "constexpr"
        value = node.value if is_constant else _call("settled", node.value)
        return ast.Assign([node.target], value)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        target = ast.parse(ast.unparse(node.target), mode="eval").body
        return ast.Assign([node.target], _call("settled", ast.BinOp(target, node.op, node.value)))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("settled", node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _call("constant", node.value) if node.attr == "value" else node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return _all_of("both" if isinstance(node.op, ast.And) else "either", node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("negated", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        operands = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            ast.Compare(left, [comparison], [right])
            for left, comparison, right in zip(operands, node.ops, operands[1:])
        ]
        return pairs[0] if len(pairs) == 1 else _all_of("both", pairs)


def _call(helper: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(_PREFIX + helper, ast.Load()), list(arguments), [])


def _all_of(helper: str, values: list[ast.expr]) -> ast.Call:
    """A call that evaluates its operands itself, one after another and as far as needed."""
    nothing = ast.arguments([], [], None, [], [], None, [])
    return _call(helper, *(ast.Lambda(nothing, value) for value in values))


def _settled(value: Any) -> Any:
    """What a variable holds: Triton gives a number that is assigned a type."""
    if value.__class__ is Value:
        return value
    if isinstance(value, (bool, int, float)):
        return as_value(value)
    return tuple(map(_settled, value)) if value.__class__ is tuple else value


def _deciding(decisive: bool, method: str) -> Callable[..., Any]:
    """``and`` or ``or`` by Triton's rules: a constant decides or is dropped; tensors are combined."""

    def decide(*operands: Callable[[], Any]) -> Any:
        remaining: list[Value] = []
        value: Any = None
        for operand in operands:
            value = operand()
            if value.__class__ is Value:
                remaining.append(value)
            elif bool(value) is decisive:
                return value
        if not remaining:
            return value
        result = remaining[0]
        for each in remaining[1:]:
            result = getattr(result, method)(each)
        return result

    return decide


def _constant(value: Any) -> Any:
    """``value.value`` of what was a ``tl.constexpr``: here constants are Python's."""
    return getattr(value, "value", value)


def _negated(value: Any) -> Any:
    return value.__not__() if value.__class__ is Value else not value


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


_HELPERS: Final[dict[str, Any]] = {
    _PREFIX + "settled": _settled,
    _PREFIX + "both": _deciding(False, "logical_and"),
    _PREFIX + "either": _deciding(True, "logical_or"),
    _PREFIX + "negated": _negated,
    _PREFIX + "constant": _constant,
}
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

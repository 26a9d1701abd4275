"""Checks what a Triton function names and which constructs it uses, and the functions that it calls."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from microddp_kernels.evaluate.names import NOT_ELEMENTWISE
from microddp_kernels.evaluate.source import function_tree, is_jitted, names_of
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["OfLanguage", "check_names", "local_names", "resolved", "used_names"]

_LANGUAGE: Final = "triton.language"
_BUILTINS: Final = frozenset("float getattr hasattr int isinstance len list max min print range".split())
"""What Triton's compiler knows of Python's built-in functions."""

_CONSTRUCTS: Final = {
    ast.Await: "await",
    ast.AsyncFunctionDef: "a function inside",
    ast.Break: "break",
    ast.ClassDef: "a class",
    ast.Continue: "continue",
    ast.Delete: "del",
    ast.Dict: "a dict",
    ast.DictComp: "a dict comprehension",
    ast.FunctionDef: "a function inside",
    ast.GeneratorExp: "a generator expression",
    ast.Global: "global",
    ast.In: "in",
    ast.Import: "import",
    ast.ImportFrom: "import",
    ast.Lambda: "lambda",
    ast.MatMult: "@",
    ast.Nonlocal: "nonlocal",
    ast.NotIn: "not in",
    ast.Raise: "raise",
    ast.Set: "a set",
    ast.SetComp: "a set comprehension",
    ast.Try: "try",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
}


def check_names(function: types.FunctionType, tree: ast.FunctionDef) -> None:
    """Checks a function and, through the names in it, all that it calls.

    Raises:
        ValueError: a construct or a name that Triton's compiler refuses, or a function of Triton that is not
            elementwise. The text names the function and the line of its source.
    """
    _Checker().check(function, tree)


@dataclass
class _Checker:
    """One check: the functions that are done, and those that called the one at hand."""

    done: set[types.FunctionType] = field(default_factory=set)
    callers: list[types.FunctionType] = field(default_factory=list)

    def check(self, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        self.callers.append(function)
        for node in body_nodes(tree):
            for kind in _kinds(node):
                if kind in _CONSTRUCTS:
                    raise _refusal(function, node, f"uses {_CONSTRUCTS[kind]}, which Triton does not compile")
            if _is_size(node):
                raise _refusal(function, node, "uses the size of a block: an operator is elementwise")
        for node, value in used_names(function, tree):
            self._check_value(function, node, value)
        self._check_methods(function, tree)
        self.callers.pop()
        self.done.add(function)

    def _check_value(self, function: types.FunctionType, node: ast.expr, value: Any) -> None:
        if is_jitted(value) and not _is_language(value.fn.__module__):
            self._check_called(function, node, value.fn)
            return
        reason = _reason_against(ast.unparse(node), value)
        if reason:
            raise _refusal(function, node, reason)

    def _check_called(self, function: types.FunctionType, node: ast.expr, called: types.FunctionType) -> None:
        if called in self.callers:
            raise _refusal(function, node, f"calls {called.__qualname__}, which calls it: Triton has no recursion")
        if called not in self.done:
            self.check(called, function_tree(called))

    def _check_methods(self, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        """Methods of tensors that are not elementwise, ``a.sum()``, of whatever is local."""
        local = local_names(tree)
        for node in body_nodes(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in NOT_ELEMENTWISE:
                continue
            root = node.value
            while isinstance(root, (ast.Attribute, ast.Call)):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            if not isinstance(root, ast.Name) or root.id in local or isinstance(node.value, ast.Call):
                raise _refusal(function, node, _not_elementwise(f".{node.attr}", node.attr))


def _kinds(node: ast.AST) -> list[type]:
    """The type of a node, and those of the operators in it, which have no line of their own."""
    if isinstance(node, ast.BinOp):
        return [type(node), type(node.op)]
    return [type(node), *map(type, node.ops)] if isinstance(node, ast.Compare) else [type(node)]


def _is_size(node: ast.AST) -> bool:
    """``x.numel``, ``x.shape[0]``; ``x.shape`` alone makes another tensor of the same shape."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, ast.Attribute) and node.attr == "numel"


def _reason_against(name: str, value: Any) -> str | None:
    """Why a function may not name ``value``; None if it may."""
    from triton.language import constexpr, dtype
    from triton.runtime.jit import ConstexprFunction

    if name in ("max", "min") and value is getattr(builtins, name):
        return f"uses Python's {name}, which Triton's interpreter gets wrong on tensors: use tl.{name}imum"
    if value is _UNKNOWN:
        return _reason_against_unknown(name)
    value = value.fn if is_jitted(value) else value
    module = str(getattr(value, "__module__", ""))
    if callable(value) and _is_language(module):
        value = OfLanguage(module, getattr(value, "__name__", ""))
    if isinstance(value, OfLanguage):
        is_refused = value.name in NOT_ELEMENTWISE and not value.module.endswith(".libdevice")
        return _not_elementwise(name, value.name) if is_refused else None
    if isinstance(value, (types.ModuleType, constexpr, dtype, ConstexprFunction)):
        return None
    if module == "builtins" or getattr(value, "__triton_aggregate__", False) or hasattr(value, "_fields"):
        return None
    if isinstance(value, ReduceOp):
        return (
            f"calls {name}, which is an operator: keep its @triton.jit function under a name of its own, and call that"
        )
    if "." in name and (isinstance(value, (bool, int, float)) or module == "math"):
        return None  # of a module: the compiler takes such a number as a constant
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"calls {name}, a plain Python function: add @triton.jit to it"
    if isinstance(value, (bool, int, float, str)):
        return (
            f"uses the global {name} = {value!r}, which Triton does not compile: write {name} = tl.constexpr({value!r})"
        )
    return (
        f"uses the global {name}, a {type(value).__name__}; only tl.constexpr globals and Triton functions can be used"
    )


def _reason_against_unknown(name: str) -> str:
    if hasattr(builtins, name):
        known = ", ".join(sorted(_BUILTINS))
        return f"uses Python's {name}, which Triton does not compile (it knows {known}; see triton.language)"
    return f"uses {name}, which is not defined (what an operator calls must be defined above it)"


def _not_elementwise(name: str, plain: str) -> str:
    return f"uses {name}, which {NOT_ELEMENTWISE[plain]}: an operator is elementwise"


def _refusal(function: types.FunctionType, node: ast.AST, reason: str) -> ValueError:
    line = getattr(node, "lineno", 1)
    return ValueError(f"{function.__qualname__} of {function.__module__} (line {line} of its source) {reason}")


def _is_language(module: str) -> bool:
    return module == _LANGUAGE or module.startswith(_LANGUAGE + ".")


class _Unknown:
    """What a name that is not defined stands for."""


@dataclass(frozen=True)
class OfLanguage:
    """An attribute of ``triton.language``, by name: while the interpreter runs, the attributes are replaced."""

    module: str
    name: str


_UNKNOWN: Final = _Unknown()


def body_nodes(tree: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of the body, without annotations, which Triton reads itself."""
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        nodes.append(node)
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting.extend(child for child in ast.iter_child_nodes(node) if child is not skipped)
    return nodes


def local_names(tree: ast.FunctionDef) -> set[str]:
    """The parameters and every name that the body assigns."""
    arguments = tree.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    names = {each.arg for each in every if each is not None}
    return names | {node.id for node in body_nodes(tree) if isinstance(node, ast.Name) and _is_store(node)}


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def used_names(function: types.FunctionType, tree: ast.FunctionDef) -> list[tuple[ast.expr, Any]]:
    """Each name, or dotted name of modules, that the body uses and does not define, and what it stands for."""
    known, local = names_of(function), local_names(tree)
    inner = {id(node.value) for node in body_nodes(tree) if isinstance(node, ast.Attribute)}
    found: list[tuple[ast.expr, Any]] = []
    for node in body_nodes(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
            pair = resolved(node, known, local)
            if pair is not None:
                found.append(pair)
    return found


def resolved(node: ast.expr, known: Mapping[str, Any], local: set[str]) -> tuple[ast.expr, Any] | None:
    """The longest part of a dotted name that goes through modules, and its value; None if it starts at a local."""
    parts: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node)
        node = node.value
    if not isinstance(node, ast.Name) or node.id in local:
        return None
    if node.id not in known:
        return (node, getattr(builtins, node.id)) if node.id in _BUILTINS else (node, _UNKNOWN)
    at: ast.expr = node
    value = known[node.id]
    for part in parts:
        if not isinstance(value, types.ModuleType):
            break
        at, value = part, _attribute(value, part.attr)
    return at, value


def _attribute(module: types.ModuleType, name: str) -> Any:
    value = getattr(module, name, _UNKNOWN)
    is_named = _is_language(module.__name__) and value is not _UNKNOWN and not isinstance(value, types.ModuleType)
    return OfLanguage(module.__name__, name) if is_named else value

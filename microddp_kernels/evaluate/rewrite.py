"""Changes the syntax tree of a Triton function where Python would do something else than Triton.

A number that a variable takes gets a type; ``and``, ``or``, ``not`` and chained comparisons work on tensors;
``.value`` of a constant is the constant; ``assert`` is for debugging.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from microddp_kernels.evaluate.errors import ConditionOnTensor
from microddp_kernels.evaluate.value import Value, as_value

__all__ = ["HELPERS", "refuses_logic", "rewritten"]

_PREFIX: Final = "__evaluate_"


def rewritten(tree: ast.FunctionDef) -> ast.FunctionDef:
    """``tree``, changed in place: without decorators, annotations and defaults, and calling ``HELPERS``."""
    return _Rewriter().function(tree)


class _Rewriter(ast.NodeTransformer):
    def function(self, tree: ast.FunctionDef) -> ast.FunctionDef:
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


refuses_logic: Final[ContextVar[bool]] = ContextVar("refuses_logic", default=False)
"""Whether ``and``, ``or`` and ``not`` of tensors raise, for all that they can be evaluated."""


def _check_logic(value: Value, used: str, instead: str) -> None:
    if value.tensor.dim() and refuses_logic.get():
        raise ConditionOnTensor(f"`{used}` of tensors is what Triton's interpreter gets wrong: use {instead}")


def _deciding(decisive: bool, method: str, used: str, instead: str) -> Callable[..., Any]:
    """``and`` or ``or`` by Triton's rules: a constant decides or is dropped; tensors are combined."""

    def decide(*operands: Callable[[], Any]) -> Any:
        remaining: list[Value] = []
        value: Any = None
        for operand in operands:
            value = operand()
            if value.__class__ is Value:
                _check_logic(value, used, instead)
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
    if value.__class__ is not Value:
        return not value
    _check_logic(value, "not", "~")
    return value.__not__()


HELPERS: Final[dict[str, Any]] = {
    _PREFIX + "settled": _settled,
    _PREFIX + "both": _deciding(False, "logical_and", "and", "&"),
    _PREFIX + "either": _deciding(True, "logical_or", "or", "|"),
    _PREFIX + "negated": _negated,
    _PREFIX + "constant": _constant,
}
"""What a rewritten function calls, by names that no user has."""

"""Checks a user's Triton functions when an operator is declared: the same verdict compiled, interpreted or evaluated.

Left to Triton, a plain global or a function that is not jitted works under the interpreter and fails on a GPU, on each
rank, in the middle of a collective.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from typing import Any, Final

import torch

from microddp_kernels.evaluate import evaluated
from microddp_kernels.evaluate.errors import ConditionOnTensor, NotEvaluable
from microddp_kernels.evaluate.source import function_tree, is_jitted
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values
from microddp_kernels.validate_names import check_names

__all__ = ["check_combine", "check_finalize", "check_runs"]

_SINGLE: Final = (ast.Constant, ast.Compare, ast.UnaryOp, ast.JoinedStr)
"""Expressions that are never a tuple."""


def check_combine(function: Any, num_lanes: int) -> None:
    """Checks a combine function: jitted, two values in, one value a lane out, elementwise and compilable.

    Raises:
        TypeError: it is not a ``@triton.jit`` function of two values.
        ValueError: something in its body (or a helper's) that no operator can use, or a wrong number of lanes.
    """
    python = _checked_jit(function, "the combine function")
    tree = _checked_tree(python)
    parameters = _check_arity(python, "the combine function takes two values")
    _check_lanes(tree, parameters, num_lanes)
    _check_of_values(tree, parameters, num_lanes)
    check_names(python, tree)


def check_finalize(function: Any, num_lanes: int) -> None:
    """Checks a finalizing function, which takes the complete fold and ``world_size``. Raises as ``check_combine``."""
    python = _checked_jit(function, "finalize")
    tree = _checked_tree(python)
    parameters = _check_arity(python, "finalize takes the fold and world_size")
    _check_lanes(tree, parameters[:1], num_lanes)
    _check_of_values(tree, parameters[:1], num_lanes)
    check_names(python, tree)


def _checked_jit(function: Any, role: str) -> types.FunctionType:
    if is_jitted(function):
        found: types.FunctionType = function.fn
        return found
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(function, ReduceOp):
        raise TypeError(f"{role} is an operator already: {function.name!r}; give the @triton.jit function")
    if isinstance(function, types.LambdaType) and function.__name__ == "<lambda>":
        raise TypeError(f"{role} is a lambda; it must be a function defined by def, with @triton.jit above it")
    if isinstance(function, (types.FunctionType, types.MethodType)):
        raise TypeError(f"{role} {name} is not a Triton function: add @triton.jit right above its def")
    if is_jitted(getattr(function, "fn", None)):
        raise TypeError(f"{role} must be a plain @triton.jit function, without {type(function).__name__} around it")
    raise TypeError(f"{role} must be a @triton.jit function, not {function!r}")


def _checked_tree(function: types.FunctionType) -> ast.FunctionDef:
    try:
        return function_tree(function)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{error}; an operator must be defined in a file or a notebook cell") from error


def _check_arity(function: types.FunctionType, rule: str) -> tuple[str, str]:
    """The names of its two parameters."""
    parameters = list(inspect.signature(function).parameters.values())
    needed = [each for each in parameters if each.default is each.empty]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < 2 or len(needed) > 2 or any(each.kind not in positional for each in parameters[:2]):
        raise TypeError(f"{rule}; {function.__qualname__} has the parameters {inspect.signature(function)}")
    if any(each.kind not in positional for each in needed):
        raise TypeError(f"{rule}; {function.__qualname__} has the parameters {inspect.signature(function)}")
    for each in parameters[:2]:
        if "constexpr" in str(each.annotation):
            raise TypeError(f"{rule}; {function.__qualname__} declares {each.name} a constant")
    return parameters[0].name, parameters[1].name


def _check_lanes(tree: ast.FunctionDef, parameters: tuple[str, ...], num_lanes: int) -> None:
    """Raises ValueError for a number of values taken from a parameter or returned that cannot be right."""
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    if not any(value is not None for value in returned):
        raise ValueError(f"{tree.name} returns nothing")
    for value in returned:
        for each in _branches(value):
            count = _count(each)
            if count is not None and count != num_lanes:
                raise ValueError(
                    f"{tree.name} returns {count} value{'s' * (count != 1)}, line {each.lineno} of its source, "
                    f"for {num_lanes} lane{'s' * (num_lanes != 1)}"
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in parameters:
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) != num_lanes:
                    raise ValueError(
                        f"{tree.name} takes {len(target.elts)} values from {node.value.id}, which has {num_lanes} "
                        f"lane{'s' * (num_lanes != 1)}"
                    )


def _check_of_values(tree: ast.FunctionDef, parameters: tuple[str, ...], num_lanes: int) -> None:
    """Raises ValueError for what Triton has not for values: ``a ** 2``, and ``a[0]`` where there is one lane."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base = node.left.value if isinstance(node.left, ast.Subscript) else node.left
            if isinstance(base, ast.Name) and base.id in parameters:
                raise ValueError(
                    f"{tree.name} uses **, line {node.lineno} of its source: Triton has no powers of values"
                )
        if num_lanes == 1 and isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Name) and node.value.id in parameters:
                raise ValueError(
                    f"{tree.name} uses {ast.unparse(node)}, line {node.lineno} of its source, for one lane: "
                    f"{node.value.id} is one value"
                )


def _branches(value: ast.expr | None) -> Iterator[ast.expr]:
    if isinstance(value, ast.IfExp):
        yield from _branches(value.body)
        yield from _branches(value.orelse)
    elif value is not None:
        yield value


def _count(value: ast.expr) -> int | None:
    """How many values an expression gives, where its form tells."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return None if any(isinstance(each, ast.Starred) for each in value.elts) else len(value.elts)
    return 1 if isinstance(value, _SINGLE) else None


def check_runs(op: ReduceOp) -> None:
    """Runs an operator on two elements, as the CPU would, to see what only running shows.

    Raises:
        ValueError: it decides by the elements of a tensor, returns another number of values than it has lanes, or
            fails on every type tried, in Triton's interpreter too.
    """
    from microddp_kernels.evaluate.rewrite import refuses_logic  # needs Triton, which is there if a function is jitted

    failures = []
    types = [_tried(lane.dtypes) for lane in op.lanes] or [_tried(op.dtypes)]
    kinds = {tuple(op.accumulation_dtype(each[min(kind, len(each) - 1)]) for each in types): None for kind in (0, 1)}
    for dtypes in kinds:
        computed = [torch.int32 if dtype == torch.bool else dtype for dtype in dtypes]
        sizes: list[tuple[int, ...]] = [(2, 2) if lane.wide else (2, 1) for lane in op.lanes] or [(2,)]
        tensors = tuple(torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, computed))
        values: Values = tensors if op.lanes else tensors[0]
        token = refuses_logic.set(True)
        try:
            body = evaluated(op)
            body.combine(values, values)
            if op.finalize is not None:
                body.finalize(values, 2)
        except ConditionOnTensor as error:
            raise ValueError(f"operator {op.name!r} uses a construct for one value on many: {error}") from error
        except NotEvaluable as error:
            if error.__cause__ is not None:  # the interpreter can do more, or tells what is wrong
                failures += [] if _is_interpretable(op, values) else [str(error)]
        finally:
            refuses_logic.reset(token)
    if len(failures) == len(kinds):
        raise ValueError(f"operator {op.name!r} cannot be run: {failures[0]}")


def _is_interpretable(op: ReduceOp, values: Values) -> bool:
    """Whether Triton's interpreter can combine ``values`` with themselves."""
    from microddp_kernels.launchers.interpreter import InterpreterLauncher  # a launcher checks operators as this does

    given = tuple(each.reshape(-1) for each in values) if isinstance(values, tuple) else values
    try:
        InterpreterLauncher().combine(given, [given, given], CombineSpec(op.on_every_type()))
    except Exception:
        return False
    return True


def _tried(legal: frozenset[torch.dtype]) -> list[torch.dtype]:
    """A float and an integer, as far as there are, or what there is."""
    floats = [dtype for dtype in (torch.float32, torch.float64) if dtype in legal]
    integers = [dtype for dtype in (torch.int32, torch.int64, torch.uint8) if dtype in legal]
    return [*floats[:1], *integers[:1]] or sorted(legal, key=str)[:1]

"""The operators by name."""

from __future__ import annotations

import copyreg
import importlib
import pickle
import threading
from typing import Any, Final

from microddp_kernels.reduce_op import KernelFunction, ReduceOp

__all__ = ["get_op", "op_names", "register_op"]

_SHIPPED: Final = "microddp_kernels.lane_operators"
"""The module whose import registers every shipped operator."""

_ops: dict[str, ReduceOp] = {}
_lock = threading.Lock()


def register_op(op: ReduceOp) -> ReduceOp:
    """Makes ``op`` known by its name and returns it.

    The same function defined again (a notebook cell that is run again, a rank thread beside others) replaces itself.

    Raises:
        ValueError: another function has this name already.
    """
    with _lock:
        found = _ops.get(op.name)
        if found is not None and _origin(found) != _origin(op):
            module, name = _origin(found)
            raise ValueError(
                f"operator {op.name!r} exists already: it is {name} of {module}; give this one another name"
            )
        _ops[op.name] = op
    return op


def op_names() -> tuple[str, ...]:
    """The names that ``get_op`` knows, in order of registration."""
    with _lock:
        return tuple(_ops)


def get_op(name_or_op: str | ReduceOp) -> ReduceOp:
    """The operator called ``name_or_op``, or the operator itself.

    Raises:
        ValueError: no operator has this name; the text lists those that exist.
        TypeError: ``name_or_op`` is neither a name nor a ReduceOp.
    """
    if isinstance(name_or_op, ReduceOp):
        return name_or_op
    if not isinstance(name_or_op, str):
        raise TypeError(f"op must be the name of an operator or a ReduceOp, not {name_or_op!r}")
    op = _ops.get(name_or_op)
    if op is None:
        raise ValueError(f"unknown operator {name_or_op!r}; known operators: {', '.join(op_names())}")
    return op


def _origin(op: ReduceOp) -> tuple[Any, Any]:
    """Where the combine function is defined."""
    combine = op.combine
    if isinstance(combine, KernelFunction):
        return combine.module, combine.name
    function = getattr(combine, "fn", combine)
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _reduced(op: ReduceOp) -> tuple[Any, tuple[Any, ...]]:
    """An operator is pickled by its name, as functions are, and found again by importing what declares it."""
    module, name = _origin(op)
    if isinstance(op.combine, KernelFunction):
        return _loaded, (_SHIPPED, op.name, op.scale)
    if _ops.get(op.name) is not op or "<locals>" in str(name):
        raise pickle.PicklingError(
            f"operator {op.name!r} cannot be pickled: {name} of {module} is not defined at the top of its module"
        )
    return _loaded, (module, op.name, None)


def _loaded(module: str, name: str, scale: float | None) -> ReduceOp:
    declaring = importlib.import_module(module)
    if scale is None:
        return get_op(name)
    made: ReduceOp = getattr(declaring, name)(scale)
    return made


copyreg.pickle(ReduceOp, _reduced)

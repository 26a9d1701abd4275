"""Which kernels there are to compile, for which operators, on which element types."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

import torch

import microddp_kernels.lane_operators  # noqa: F401 (it registers its operators)
from microddp_kernels.dtypes import dtype_names
from microddp_kernels.inspection.facts import Case
from microddp_kernels.operators import get_op, op_names
from microddp_kernels.reduce_op import KernelFunction, ReduceOp

__all__ = ["DTYPES", "KERNELS", "cases_for", "load_operator"]

DTYPES: Final[dict[str, torch.dtype]] = {
    dtype_names([dtype]): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.complex64, torch.complex128),
        *(torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        torch.bool,
    )
}
"""The element types by name, in the order of the report."""

_OF_OPERATORS: Final = {
    "combine": "two operands",
    "fold": "four operands",
    "finish": "four operands, then divided or finalized",
    "weighted": "two operands with weights: the mean of what they cover",
    "wire": "an operand of the result's type and one of a narrower type that travelled",
}
_WITHOUT_OPERATOR: Final = {
    "copy": "contiguous to contiguous, of one type",
    "convert": "contiguous to contiguous, from one float type to another",
    "strided": "a transposed matrix to a contiguous one",
    "pack": "many tensors into one",
    "unpack": "one tensor into many",
}
KERNELS: Final = {**_OF_OPERATORS, **_WITHOUT_OPERATOR}
"""What is launched, by the name in the report."""

_WIRES: Final = {
    torch.float64: (torch.float32,),
    torch.float32: (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    torch.bfloat16: (torch.float8_e4m3fn, torch.float8_e5m2),
    torch.float16: (torch.float8_e4m3fn, torch.float8_e5m2),
}
"""By the type of a tensor: the narrower types in which it may travel."""


@cache
def load_operator(name: str) -> ReduceOp:
    """The operator called ``name``, or, of ``"module:attribute"``, the one that a module holds.

    Raises:
        ValueError: there is no such operator, module or attribute, or the module fails when it is imported.
        TypeError: the attribute is not a ReduceOp.
    """
    if ":" not in name:
        return get_op(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"operator {name!r}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        known = ", ".join(sorted(key for key, value in vars(module).items() if isinstance(value, ReduceOp)))
        raise ValueError(f"operator {name!r}: {module_name} has no {attribute!r}; its operators: {known or 'none'}")
    op = getattr(module, attribute)
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{name!r} is no operator but of type {type(op).__name__}: declare it with @microddp.reduce_op")
    return op


def cases_for(
    archs: Sequence[int],
    operators: Sequence[str] | None = None,
    dtypes: Iterable[str] | None = None,
    kernels: Sequence[str] = ("combine",),
    quick: bool = False,
) -> list[Case]:
    """The cases, sorted by architecture, kernel, operator and type.

    Args:
        archs: compute capabilities, 90 for sm_90.
        operators: names, or ``"module:attribute"``; None: all that are shipped.
        dtypes: names of element types, of the first lane; None: all on which an operator is defined.
        kernels: keys of ``KERNELS``. Where an operator has no such kernel (only averages are weighted), it is left out.
        quick: of each operator and kernel the first type only.

    Raises:
        ValueError: an unknown name. TypeError: see ``load_operator``.
    """
    names = _shipped() if operators is None else tuple(dict.fromkeys(operators))
    wanted = tuple(DTYPES if dtypes is None else dict.fromkeys(dtypes))
    _check_known("element type", wanted, DTYPES)
    _check_known("kernel", kernels, KERNELS)
    cases = []
    for kernel in dict.fromkeys(kernels):
        for operator in names if kernel in _OF_OPERATORS else ("",):
            combinations = _combinations(kernel, operator, [DTYPES[each] for each in wanted])
            for types in combinations[:1] if quick else combinations:
                cases.append((kernel, operator, tuple(dtype_names([each]) for each in types)))
    return [Case(arch, *each) for arch in dict.fromkeys(archs) for each in cases]


def _shipped() -> tuple[str, ...]:
    """Not those that a user has registered here, of whose names the processes that compile have not heard."""
    return tuple(name for name in op_names() if isinstance(get_op(name).combine, KernelFunction))


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def _combinations(kernel: str, operator: str, wanted: list[torch.dtype]) -> list[tuple[torch.dtype, ...]]:
    """The element types on which a kernel is compiled, of those wanted first."""
    if kernel == "convert":
        both = [(wide, narrow) for wide in wanted for narrow in _WIRES.get(wide, ())]
        return [*both, *(pair[::-1] for pair in both)]
    if kernel in _WITHOUT_OPERATOR:
        return [(each,) for each in wanted]
    op = load_operator(operator)
    legal = [each for each in wanted if each in (op.lanes[0].dtypes if op.lanes else op.dtypes)]
    if kernel == "wire":
        wires = {each: () if op.lanes else _WIRES.get(each, ()) for each in legal}
        return [(each, wire) for each in legal for wire in wires[each] if wire in op.dtypes]
    if kernel == "weighted":
        legal = [each for each in legal if op.divides and op.travels_as_mean(each)]
    elif kernel == "finish" and not op.finishes:
        legal = []
    return [_lane_dtypes(op, each) for each in legal]


def _lane_dtypes(op: ReduceOp, first: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of each lane: the first lane's type if that is legal, else int64, else float32, else another."""
    if not op.lanes:
        return (first,)
    orders = (first, torch.int64, torch.float32, *DTYPES.values())
    rest = (next((each for each in orders if each in lane.dtypes), first) for lane in op.lanes[1:])
    return (first, *rest)

"""``reduce_op``: makes an operator of a user's Triton function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, overload

import torch

from microddp_kernels.declare_checks import check_accumulate, check_nan, check_rest
from microddp_kernels.dtypes import BOOL, COMPLEX, FLOATS, FLOATS8, INTEGERS, UNSIGNED, dtype_names
from microddp_kernels.fingerprint import fingerprint
from microddp_kernels.op_registry import register_op
from microddp_kernels.reduce_op import Lane, ReduceOp
from microddp_kernels.validate import check_combine, check_finalize, check_runs

__all__ = ["reduce_op"]

Types = torch.dtype | Iterable[torch.dtype] | Literal["floats", "integers"]

_EVERY: Final = FLOATS | FLOATS8 | INTEGERS | UNSIGNED | BOOL
_KINDS: Final = {"floats": FLOATS | FLOATS8, "integers": INTEGERS | UNSIGNED}


@overload
def reduce_op(function: Any, /) -> ReduceOp: ...


@overload
def reduce_op(
    *,
    name: str | None = None,
    commutative: bool = False,
    associative: bool = True,
    lanes: int | Sequence[str | Lane] = 1,
    wide: Sequence[str] = (),
    dtypes: Types | Mapping[str, Any] | None = None,
    accumulate: torch.dtype | None = None,
    finalize: Any = None,
    torch_function: Callable[..., Any] | None = None,
    torch_finalize: Callable[..., Any] | None = None,
    nan: Literal["propagate", "ignore"] | None = None,
) -> Callable[[Any], ReduceOp]: ...


def reduce_op(function: Any = None, /, **declared: Any) -> Any:
    """Makes an operator of a ``@triton.jit`` function of two values, and makes it known by its name.

    The function takes two values in the accumulation type (16- and 8-bit floats as float32, truth values as int32) and
    returns their combination; with several lanes it takes and returns tuples. Used as a decorator above
    ``@triton.jit``, with or without arguments.

    Args:
        name: how ``op="name"`` finds it; the function's own name by default.
        commutative: that the order of two operands does not matter. Algorithms that exchange them need it.
        associative: that grouping does not matter, up to rounding.
        lanes: the names of the tensors that are reduced in lockstep, or how many there are.
        wide: the lanes, by name, that have a whole number of elements for each element of the others.
        dtypes: the legal element types: one, several, ``"floats"`` or ``"integers"``; for lanes a mapping from names to
            those. By default every float, integer and bool.
        accumulate: a wider type to compute in.
        finalize: a ``@triton.jit`` function of the complete fold and world_size, called once for each element.
        torch_function, torch_finalize: the same functions on whole torch tensors, for the CPU; by default the Triton
            functions are evaluated there.
        nan: what it claims of NaN: that it propagates, or that the other operand is taken.

    Raises:
        TypeError: something is not of the type it must be; not a ``@triton.jit`` function, for one.
        ValueError: a declaration that contradicts another, a function that Triton would not compile or that is not
            elementwise, or a name that another function has.
    """
    if function is not None:
        if declared:
            raise TypeError("reduce_op takes a function alone, or keyword arguments alone and then the function")
        return _declare(function)
    unknown = declared.keys() - inspect.signature(_declare).parameters.keys()
    if unknown:
        raise TypeError(f"reduce_op got unknown arguments: {', '.join(sorted(unknown))}")
    return lambda decorated: _declare(decorated, **declared)


def _declare(
    function: Any,
    *,
    name: str | None = None,
    commutative: bool = False,
    associative: bool = True,
    lanes: int | Sequence[str | Lane] = 1,
    wide: Sequence[str] = (),
    dtypes: Types | Mapping[str, Any] | None = None,
    accumulate: torch.dtype | None = None,
    finalize: Any = None,
    torch_function: Callable[..., Any] | None = None,
    torch_finalize: Callable[..., Any] | None = None,
    nan: Literal["propagate", "ignore"] | None = None,
) -> ReduceOp:
    made_lanes = _lanes(lanes, wide, dtypes)
    num_lanes = len(made_lanes) or 1
    check_combine(function, num_lanes)
    if finalize is not None:
        check_finalize(finalize, num_lanes)
    called = function.fn.__name__ if name is None else name
    legal = made_lanes[0].dtypes if made_lanes else _types(dtypes, "dtypes")
    every = [lane.dtypes for lane in made_lanes] or [legal]
    check_rest(called, commutative, associative, finalize, torch_function, torch_finalize)
    check_accumulate(accumulate, every)
    check_nan(nan, every)
    texts = [(lane.name, dtype_names(lane.dtypes), lane.wide) for lane in made_lanes] or dtype_names(legal)
    laws = (called, commutative, associative, texts, accumulate, nan)
    op = ReduceOp(
        name=called,
        combine=function,
        eager=None,
        dtypes=legal,
        lanes=made_lanes,
        commutative=commutative,
        associative=associative,
        accumulate=accumulate,
        finalize=finalize,
        torch_function=torch_function,
        torch_finalize=torch_finalize,
        nan=nan,
        fingerprint=fingerprint((function, finalize), (torch_function, torch_finalize), laws),
    )
    check_runs(op)
    return register_op(op)


def _lanes(
    lanes: int | Sequence[str | Lane], wide: Sequence[str], dtypes: Types | Mapping[str, Any] | None
) -> tuple[Lane, ...]:
    """The lanes, if there are several. Raises TypeError or ValueError."""
    if isinstance(lanes, bool) or not isinstance(lanes, (int, Sequence)) or isinstance(lanes, str):
        raise TypeError(f"lanes must be a number or a sequence of names, not {lanes!r}")
    if isinstance(lanes, int):
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        lanes = [f"lane{number}" for number in range(lanes)] if lanes > 1 else []
    elif len(lanes) < 2:
        raise ValueError(f"lanes names at least 2 lanes, got {list(lanes)}; an operator of one tensor declares none")
    for each in lanes:
        if not isinstance(each, (str, Lane)):
            raise TypeError(f"a lane is a name or a Lane, not {each!r}")
    names = [each.name if isinstance(each, Lane) else each for each in lanes]
    _check_lane_names(names, wide, dtypes)
    made = []
    for each in lanes:
        if isinstance(each, Lane):
            if isinstance(dtypes, Mapping) and each.name in dtypes:
                raise ValueError(f"the types of lane {each.name!r} are given twice")
            made.append(Lane(each.name, _types(each.dtypes, each.name), each.wide or each.name in wide))
        else:
            given = dtypes.get(each) if isinstance(dtypes, Mapping) else dtypes
            made.append(Lane(each, _types(given, f"the dtypes of lane {each!r}"), each in wide))
    if made and all(lane.wide for lane in made):
        raise ValueError("every lane is declared wide; a wide lane is wider than another")
    return tuple(made)


def _check_lane_names(names: list[str], wide: Sequence[str], dtypes: Any) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"two lanes have one name: {', '.join(names)}")
    if isinstance(wide, str):
        raise TypeError(f"wide must be a sequence of names of lanes, not {wide!r}")
    of_types = list(dtypes) if isinstance(dtypes, Mapping) else []
    for what, mentioned in (("wide", list(wide)), ("dtypes", of_types)):
        unknown = [each for each in mentioned if each not in names]
        if unknown:
            known = f"the lanes are {', '.join(names)}" if names else "the operator has one lane, without a name"
            raise ValueError(f"{what} names {', '.join(map(str, unknown))}, which is no lane; {known}")


def _types(given: Any, what: str) -> frozenset[torch.dtype]:
    """The element types that are meant."""
    if given is None:
        return _EVERY
    if isinstance(given, str):
        if given not in _KINDS:
            raise ValueError(f"{what} must be element types, 'floats' or 'integers', not {given!r}")
        return _KINDS[given]
    if isinstance(given, torch.dtype):
        given = [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{what} must be element types, 'floats' or 'integers', not {given!r}")
    types = list(given)
    for each in types:
        if not isinstance(each, torch.dtype):
            raise TypeError(f"{what} must be element types, not {each!r}")
    if not types:
        raise ValueError(f"{what} names no element type")
    illegal = frozenset(types) - _EVERY
    if illegal:
        extra = " (complex types are for the built-in operators)" if illegal & COMPLEX else ""
        raise ValueError(f"{what} names {dtype_names(illegal)}; known are {dtype_names(_EVERY)}{extra}")
    return frozenset(types)

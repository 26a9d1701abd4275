"""Which functions combine and finalize an operator on torch tensors: its own torch functions, or its body evaluated."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from microddp_kernels.dtypes import UNSIGNED, dtype_names
from microddp_kernels.evaluate import NotEvaluable, evaluated
from microddp_kernels.reduce_op import Lane, ReduceOp, Values
from microddp_kernels.scratch import block_scratch

__all__ = ["Lanes", "Steps", "as_op_of_parts", "steps_for"]

Lanes = tuple[torch.Tensor, ...]
"""The tensors of an operand, one a lane."""


@dataclass(slots=True, eq=False)
class Steps:
    """The functions of an operator on some accumulation types.

    Attributes:
        op: the operator.
        dtypes: the type in which an operand of each lane is handed over.
        combine: one step of a fold. What it returns is new, or this thread's scratch.
        finalize: of a complete fold and its number of contributions; None: there is nothing to finalize.
        combine_writes, finalize_writes: it may change its arguments, which must not be the caller's memory then.
        stops: what the two raise when a body cannot be evaluated on tensors.
        refused: None, or why the operator cannot be combined on torch tensors of these types.
    """

    op: ReduceOp
    dtypes: tuple[torch.dtype, ...]
    combine: Callable[[Lanes, Lanes], Lanes] | None = None
    finalize: Callable[[Lanes, int], Lanes] | None = None
    combine_writes: bool = False
    finalize_writes: bool = False
    stops: tuple[type[Exception], ...] = ()
    refused: str | None = None

    def refuse(self, reason: str) -> None:
        """From now on the interpreter serves; the user is told once for each operator.

        Raises:
            TypeError: nor can the interpreter serve, which knows no function of libdevice.
        """
        if reason.startswith("libdevice."):
            raise TypeError(
                f"operator {self.op.name!r} cannot be combined on CPU tensors: {reason} has no form there; "
                "give a torch_function"
            )
        self.refused = reason
        _warning(self.op).give(self.op, reason)


@dataclass(slots=True, eq=False)
class _Warning:
    """Whether the user has been warned that an operator is interpreted."""

    given: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def give(self, op: ReduceOp, reason: str) -> None:
        with self.lock:
            given, self.given = self.given, True
        if not given:
            text = f"operator {op.name!r} runs in the Triton interpreter on CPU tensors, which is slow: {reason}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


@lru_cache(maxsize=1024)
def _warning(op: ReduceOp) -> _Warning:
    return _Warning()


@lru_cache(maxsize=1024)
def as_op_of_parts(op: ReduceOp) -> ReduceOp:
    """An operator with a ``complex_combine`` as one of two float lanes, the real and the imaginary parts."""
    lanes = tuple(Lane(name, frozenset({torch.float32, torch.float64})) for name in ("real", "imaginary"))
    parts = replace(op, combine=op.complex_combine, lanes=lanes, complex_combine=None)
    return replace(parts, eager=None, torch_function=None, torch_finalize=None)


@lru_cache(maxsize=1024)
def steps_for(op: ReduceOp, accumulation: tuple[torch.dtype, ...]) -> Steps:
    """How ``op`` is combined on these accumulation types: by ``eager``, else ``torch_function``, else its body."""
    computes = tuple(torch.int32 if dtype == torch.bool else dtype for dtype in accumulation)
    steps = Steps(op, computes if op.eager is None else accumulation)
    unknown = UNSIGNED.intersection(accumulation)
    if unknown and (op.eager is None or op.finalize is not None):
        steps.refuse(f"torch computes on no {dtype_names(unknown)} there")
    else:
        _find_functions(steps, _Calls(op, accumulation, computes))
    return steps


def _find_functions(steps: Steps, calls: _Calls) -> None:
    op = steps.op
    body: Any = None
    is_finalized_by_body = op.finalize is not None and op.torch_finalize is None
    if is_finalized_by_body or (op.eager is None and op.torch_function is None):
        body = _evaluated(steps)
        if steps.refused is not None:
            return
    if op.eager is not None:
        steps.combine = calls.of_eager
    elif op.torch_function is not None:
        steps.combine, steps.combine_writes = calls.of_two("torch_function", op.torch_function), True
    else:
        steps.combine = calls.of_two("combine function", body.combine)
    if is_finalized_by_body:
        steps.finalize = calls.of_fold("finalizing function", body.finalize)
    elif op.finalize is not None and op.torch_finalize is not None:
        steps.finalize, steps.finalize_writes = calls.of_fold("torch_finalize", op.torch_finalize), True


def _evaluated(steps: Steps) -> Any:
    """The operator's Triton functions on torch tensors; None if they have no such form."""
    steps.stops = (NotEvaluable,)
    try:
        return evaluated(steps.op)
    except NotEvaluable as error:
        steps.refuse(str(error))
        return None


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls an operator's functions with tensors, or tuples of them for several lanes, and checks what they return."""

    op: ReduceOp
    accumulation: tuple[torch.dtype, ...]
    computes: tuple[torch.dtype, ...]

    def of_eager(self, first: Lanes, second: Lanes) -> Lanes:
        total = tuple(
            block_scratch(f"eager total {lane}", each.dtype, each.numel()).view(each.shape)
            for lane, each in enumerate(first)
        )
        if self.op.eager is None:
            raise RuntimeError(f"operator {self.op.name!r} has no eager function")
        self.op.eager(self._values(first), self._values(second), out=self._values(total))
        return total

    def of_two(self, name: str, function: Callable[..., Any]) -> Callable[[Lanes, Lanes], Lanes]:
        def call(first: Lanes, second: Lanes) -> Lanes:
            return self._settled(name, function(self._values(first), self._values(second)), first, (*first, *second))

        return call

    def of_fold(self, name: str, function: Callable[..., Any]) -> Callable[[Lanes, int], Lanes]:
        def call(total: Lanes, world_size: int) -> Lanes:
            # An eager function leaves truth values as bool.
            given = tuple(each.to(dtype) for each, dtype in zip(total, self.computes, strict=True))
            return self._settled(name, function(self._values(given), world_size), given, given)

        return call

    def _values(self, lanes: Lanes) -> Values:
        return lanes if self.op.lanes else lanes[0]

    def _settled(self, name: str, found: Any, like: Lanes, arguments: Lanes) -> Lanes:
        """What a function returned, in the accumulation types; copied if it is memory of an argument."""
        results = tuple(found) if self.op.lanes and isinstance(found, (tuple, list)) else (found,)
        who = f"the {name} of operator {self.op.name!r}"
        if len(results) != len(like) or not all(isinstance(each, torch.Tensor) for each in results):
            kinds = ", ".join(type(each).__name__ for each in results)
            raise TypeError(f"{who} must return {len(like)} tensor{'s' * (len(like) > 1)}, got {kinds}")
        settled = []
        for lane, (result, wanted) in enumerate(zip(results, like, strict=True)):
            if result.shape != wanted.shape:
                shapes = f"{tuple(result.shape)} instead of {tuple(wanted.shape)}"
                raise ValueError(f"{who} must return tensors of the shapes that it is given, got {shapes}")
            dtype = self.computes[lane]
            if self.accumulation[lane] is torch.bool:
                settled.append(result.ne(0).to(dtype))
            elif result.dtype is not dtype:
                if not _holds(result.dtype, dtype):
                    raise TypeError(f"{who} must return {dtype_names([dtype])}, got {dtype_names([result.dtype])}")
                settled.append(result.to(dtype))
            else:
                settled.append(result.clone() if _is_memory_of(result, arguments) else result)
        return tuple(settled)


def _holds(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a function may return ``found`` for ``wanted``: a truth value, or the same kind and no less precise."""
    if found is torch.bool:
        return True
    kinds = [(each.is_floating_point, each.is_complex) for each in (found, wanted)]
    return kinds[0] == kinds[1] and found.itemsize >= wanted.itemsize


def _is_memory_of(result: torch.Tensor, arguments: Lanes) -> bool:
    address = result.data_ptr()
    for each in arguments:
        start = each.data_ptr()
        if start <= address < start + each.nbytes:
            return True
    return False

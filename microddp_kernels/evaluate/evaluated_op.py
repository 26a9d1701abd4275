"""An operator whose Triton functions run on whole torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from microddp_kernels.evaluate.convert import convert
from microddp_kernels.evaluate.element_types import INT32, STORAGE, triton_type
from microddp_kernels.evaluate.errors import ConditionOnTensor, NotEvaluable
from microddp_kernels.evaluate.twin import twin_of
from microddp_kernels.evaluate.value import Value, as_value
from microddp_kernels.reduce_op import ReduceOp, Values

__all__ = ["EvaluatedOp"]


class EvaluatedOp:
    """What an operator's ``combine`` and ``finalize`` give, at the speed of torch. Safe to call from several threads.

    Raises:
        NotEvaluable: a function has no torch form.
    """

    __slots__ = ("_combine", "_finalize", "_op")

    def __init__(self, op: ReduceOp) -> None:
        self._op = op
        self._combine = twin_of(op.combine)
        self._finalize = None if op.finalize is None else twin_of(op.finalize)

    def combine(self, first: Values, second: Values) -> Values:
        """The combination of two operands, in new tensors.

        Args:
            first, second: of the accumulation types, a tuple if the operator has several lanes; of one shape, or for
                wide lanes (rows, columns) beside (rows, 1). Truth values are int32 zeros and ones.

        Raises:
            NotEvaluable: it cannot be evaluated for these types; the text says why.
            ConditionOnTensor: it decides by the elements of a tensor, which is wrong everywhere.
            ValueError: the function returns another number of values than there are lanes, or values of another shape.
        """
        return self._run(self._combine, (first, second), _wrapped(first), _wrapped(second))

    def finalize(self, values: Values, world_size: int) -> Values:
        """The finalized fold of ``world_size`` contributions, in new tensors. Raises as ``combine`` does."""
        if self._finalize is None:
            raise ValueError(f"operator {self._op.name!r} has no finalize")
        size = Value(torch.tensor(world_size, dtype=torch.int32), INT32)
        return self._run(self._finalize, (values,), _wrapped(values), size)

    def _run(self, twin: Callable[..., Any], operands: tuple[Values, ...], first: Any, second: Any) -> Values:
        try:
            found = twin(first, second)
        except (NotEvaluable, ConditionOnTensor):
            raise
        except Exception as error:
            # The interpreter is the judge of what is wrong in itself and what was only not foreseen here.
            raise NotEvaluable(f"{type(error).__name__}: {error}") from error
        like = operands[0]
        if not isinstance(like, tuple):
            if isinstance(found, tuple):
                raise ValueError(f"operator {self._op.name!r} has one lane, but returned {len(found)} values")
            return self._unwrapped(found, like, 0, operands)
        if not isinstance(found, tuple) or len(found) != len(like):
            count = len(found) if isinstance(found, tuple) else 1
            raise ValueError(f"operator {self._op.name!r} has {len(like)} lanes, but returned {count} values")
        memory = tuple(chain.from_iterable(operands))
        return tuple(
            self._unwrapped(value, tensor, lane, memory) for lane, (value, tensor) in enumerate(zip(found, like))
        )

    def _unwrapped(self, found: Any, like: torch.Tensor, lane: int, operands: tuple[Any, ...]) -> torch.Tensor:
        """What a function returned for a lane, as a new tensor of the lane's type and shape."""
        try:
            value = as_value(found)
            tensor = convert(value.tensor, value.dtype, triton_type(like.dtype))
        except TypeError as error:
            raise ValueError(f"operator {self._op.name!r} returned {found!r}, which is no value") from error
        if tensor.shape != like.shape:
            tensor = self._fitted(tensor, like, lane)
        if any(tensor.data_ptr() == operand.data_ptr() for operand in operands):
            tensor = tensor.clone()
        return tensor.view(like.dtype) if tensor.dtype != like.dtype else tensor

    def _fitted(self, tensor: torch.Tensor, like: torch.Tensor, lane: int) -> torch.Tensor:
        """A narrower value repeated. Raises ValueError for a value that has more elements than its lane."""
        try:
            return tensor.expand(like.shape).contiguous()
        except RuntimeError as error:
            name = repr(self._op.lanes[lane].name) if self._op.lanes else str(lane)
            raise ValueError(
                f"operator {self._op.name!r} returned a value of shape {tuple(tensor.shape)} for lane {name}, which "
                f"has shape {tuple(like.shape)}: what a narrow lane gets must not depend on a wide one"
            ) from error


def _wrapped(values: Values) -> Any:
    if isinstance(values, tuple):
        return tuple(map(_wrapped, values))
    dtype = triton_type(values.dtype)
    stored = STORAGE[dtype.name]
    return Value(values if values.dtype is stored else values.view(stored), dtype)

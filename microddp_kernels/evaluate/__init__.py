"""Triton functions of two values run on whole torch tensors, at torch's speed: how user operators work on the CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from microddp_kernels.evaluate.errors import NotEvaluable
from microddp_kernels.reduce_op import ReduceOp

if TYPE_CHECKING:
    from microddp_kernels.evaluate.evaluated_op import EvaluatedOp

__all__ = ["NotEvaluable", "evaluated"]


@lru_cache(maxsize=1024)
def evaluated(op: ReduceOp) -> EvaluatedOp:
    """The functions of ``op`` on torch tensors; made once.

    Raises:
        NotEvaluable: they use something that has no torch form, or Triton is missing; the text says what.
    """
    try:
        from microddp_kernels.evaluate.evaluated_op import EvaluatedOp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise NotEvaluable("Triton is not installed") from error
    return EvaluatedOp(op)

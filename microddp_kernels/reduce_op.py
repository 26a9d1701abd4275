"""What a reduction operator declares: its combine function, on values (Triton) and on whole tensors (torch)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CombineSpec", "KernelFunction", "ReduceOp", "dtype_names"]

_WIDENED = frozenset({torch.float16, torch.bfloat16})


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """The names of ``dtypes`` without their module, sorted: ``"bfloat16, float16"``."""
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """A ``@triton.jit`` function by name, imported when a Triton launcher first needs it.

    It keeps operators usable where Triton is missing and the import of the library fast.
    """

    module: str
    name: str

    def load(self) -> Any:
        """The function. Raises ImportError where Triton is missing."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True, slots=True, eq=False)
class ReduceOp:
    """A reduction operator.

    Attributes:
        name: how callers name it, ``"sum"``.
        combine: a ``@triton.jit`` function of two values in the accumulation type, or a ``KernelFunction`` naming one.
            On bool elements the values are int32 zeros and ones, and what is not zero is stored as True.
        eager: the same on whole tensors: ``eager(a, b, out=out)``; ``out`` may be ``a`` or ``b``.
        dtypes: the element types on which it has a meaning.
        commutative, associative: the laws that decide which algorithms may use it.
        divides: the fold is divided by the number of contributions at the end (``avg``).
    """

    name: str
    combine: Any
    eager: Callable[..., torch.Tensor]
    dtypes: frozenset[torch.dtype]
    commutative: bool = True
    associative: bool = True
    divides: bool = False

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises TypeError, naming the operator, the dtype and the legal dtypes, if ``dtype`` has no meaning here."""
        if dtype not in self.dtypes:
            raise TypeError(
                f"operator {self.name!r} is not defined on {dtype_names([dtype])}; "
                f"it is defined on {dtype_names(self.dtypes)}"
            )

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a fold of ``dtype`` elements is computed: float32 for 16-bit floats, else ``dtype``."""
        return torch.float32 if dtype in _WIDENED else dtype

    def travels_as_mean(self, dtype: torch.dtype) -> bool:
        """True where partial results of this operator travel as the mean of what they cover (``avg`` of float16).

        A float16 sum can overflow, and a tiny one flush, on the way; the mean of what is covered cannot.
        """
        return self.divides and dtype == torch.float16


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """How one launch combines its operands.

    The value is ``op`` folded from the left over the operands, in the accumulation type of the element type, then
    divided by ``divisor`` (correctly rounded), then rounded once to the type of ``out``.

    Attributes:
        op: the operator.
        weights: None, or the number of contributions behind each operand. Then the operands are means, and the
            value is ``sum(weight * operand) / sum(weights)``, folded from the left in the accumulation type.
        divisor: None, or what the fold is divided by. Never together with ``weights``.
    """

    op: ReduceOp
    weights: tuple[int, ...] | None = None
    divisor: int | None = None

"""What a reduction operator declares: its combine function on values (Triton), its lanes, types and laws."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from microddp_kernels.dtypes import (
    BOOL,
    COMPLEX,
    FLOATS,
    FLOATS8,
    INTEGERS,
    NARROW_FLOATS,
    UNSIGNED,
    dtype_names,
)

__all__ = ["CombineSpec", "KernelFunction", "Lane", "ReduceOp", "Values"]

_EVERY_TYPE: Final = FLOATS | FLOATS8 | INTEGERS | UNSIGNED | BOOL | COMPLEX

Values = torch.Tensor | tuple[torch.Tensor, ...]
"""What an operator works on: a tensor, or a tuple of them, one a lane, if it has several."""


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


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the tensors that an operator reduces in lockstep.

    Attributes:
        name: for texts.
        dtypes: the element types that it may have.
        wide: it has a whole number of elements for each element of the others: their shape and further dimensions.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    wide: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReduceOp:
    """A reduction operator.

    An operator of one lane combines tensors; of several, tuples of tensors: ``combine`` then takes and returns tuples,
    and so do ``eager``, ``torch_function`` and the finalizing functions. If a lane is wide, a combine function gets
    blocks of shape (rows, 1) for the others and (rows, columns) for the wide lanes, and what it returns for the others
    must not depend on the wide ones.

    Attributes:
        name: how callers name it, ``"sum"``.
        combine: a ``@triton.jit`` function of two values in the accumulation type, or a ``KernelFunction`` naming one.
            On bool elements the values are int32 zeros and ones, and what is not zero is stored as True.
        eager: the same on whole tensors: ``eager(a, b, out=out)``, with the bits of ``combine``; ``out`` may be ``a``
            or ``b``. Given 16-bit floats it computes in float32 and rounds once. None: ``torch_function`` serves, or
            the body of ``combine`` evaluated on tensors.
        dtypes: the element types on which it has a meaning (of the first lane, if it has several).
        lanes: the lanes, if there are several; else empty.
        commutative, associative: the laws that decide which algorithms may use it.
        divides: the fold is divided by the number of contributions at the end (``avg``).
        accumulate: a type to compute in that is wider than the usual one; for the lanes of its kind (float, integer).
        finalize: None, or a ``@triton.jit`` function (or ``KernelFunction``) of the complete fold and world_size,
            called once for each element before it is rounded.
        torch_function, torch_finalize: ``(a, b)`` and ``(x, world_size)`` on whole tensors of the accumulation type;
            return new tensors or change their arguments in place. None: evaluated from the Triton functions.
        complex_combine: for complex elements, a combine function on tuples (real, imaginary); None: ``combine`` on
            each part.
        scale: None, or what every contribution is multiplied by before it is combined (``premul_sum``).
        nan: what it claims of NaN operands in float lanes: "propagate", "ignore" (the other operand is taken), or None.
        fingerprint: tells apart operators of one name; ranks that disagree on it are told so.
    """

    name: str
    combine: Any
    eager: Callable[..., Any] | None
    dtypes: frozenset[torch.dtype]
    lanes: tuple[Lane, ...] = ()
    commutative: bool = True
    associative: bool = True
    divides: bool = False
    accumulate: torch.dtype | None = None
    finalize: Any = None
    torch_function: Callable[..., Any] | None = None
    torch_finalize: Callable[..., Any] | None = None
    complex_combine: Any = None
    scale: float | None = None
    nan: Literal["propagate", "ignore"] | None = None
    fingerprint: str = ""

    @property
    def num_lanes(self) -> int:
        """How many tensors it reduces in lockstep."""
        return len(self.lanes) or 1

    @property
    def finishes(self) -> bool:
        """Whether something is done to a complete fold: a division or ``finalize``."""
        return self.divides or self.finalize is not None

    def check_dtype(self, dtype: torch.dtype, lane: int = 0) -> None:
        """Raises TypeError, naming the operator, the dtype and the legal dtypes, if ``dtype`` has no meaning there."""
        dtypes = self.lanes[lane].dtypes if self.lanes else self.dtypes
        if dtype not in dtypes:
            where = f"lane {self.lanes[lane].name!r} of operator {self.name!r}" if self.lanes else None
            raise TypeError(
                f"{where or f'operator {self.name!r}'} is not defined on {dtype_names([dtype])}; "
                f"it is defined on {dtype_names(dtypes)}"
            )

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a fold of ``dtype`` elements is computed.

        float32 for 16- and 8-bit floats, else ``dtype`` itself; or ``accumulate``, if that is a wider float for floats,
        or a wider integer for integers.
        """
        usual = torch.float32 if dtype in NARROW_FLOATS else dtype
        wanted = self.accumulate
        if wanted is None or dtype.is_complex or dtype == torch.bool:
            return usual
        is_wider = wanted.is_floating_point == usual.is_floating_point and wanted.itemsize > usual.itemsize
        return wanted if is_wider else usual

    def on_every_type(self) -> ReduceOp:
        """The operator defined on every type, and computing in the type of its operands: for tests of its function."""
        lanes = tuple(replace(lane, dtypes=_EVERY_TYPE) for lane in self.lanes)
        return replace(self, lanes=lanes, dtypes=_EVERY_TYPE, accumulate=None)

    def travels_as_mean(self, dtype: torch.dtype) -> bool:
        """True where partial results of this operator travel as the mean of what they cover (``avg`` of float16).

        A sum of 8-bit floats or float16 can overflow, and a tiny one flush, on the way; the mean of what is covered
        cannot.
        """
        return self.divides and (dtype == torch.float16 or dtype in FLOATS8)


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """How one launch combines its operands.

    The value is ``op`` folded from the left over the operands, in the accumulation type of the element types, then
    finished for ``divisor`` contributions (divided, correctly rounded; or finalized), then rounded once to the type of
    ``out``. A single operand is only converted, scaled and finished.

    Attributes:
        op: the operator.
        weights: None, or the number of contributions behind each operand. Then the operands are means, and the
            value is ``sum(weight * operand) / sum(weights)``, folded from the left in the accumulation type.
        divisor: None, or the number of contributions in the complete fold. Never together with ``weights``.
        scale: None, or what the operand is multiplied by in the accumulation type; for a single float or complex one.
    """

    op: ReduceOp
    weights: tuple[int, ...] | None = None
    divisor: int | None = None
    scale: float | None = None

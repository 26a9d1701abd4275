"""A torch tensor that behaves as a Triton tensor does: promotion, integer division, comparison and shifts by its rules.

An operation costs one torch call and about half a microsecond when both operands have one type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microddp_kernels.evaluate.convert import bitcast, convert, number_as, tensor_of
from microddp_kernels.evaluate.element_types import (
    INT1,
    STORAGE,
    canonical,
    common_of_all,
    common_type,
    number_in,
    type_of_number,
)
from microddp_kernels.evaluate.errors import ConditionOnTensor, NotEvaluable
from microddp_kernels.evaluate.rules import (
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    divide,
    divide_integers,
    equal,
    greater,
    greater_equal,
    less,
    less_equal,
    multiply,
    not_equal,
    remainder,
    shift_left,
    shift_right,
    subtract,
)

__all__ = ["Value", "as_value", "cast", "paired", "paired_tensors", "together"]

Rule = Callable[[Any, Any, Any], tuple[torch.Tensor, Any]]


class Value:
    """A tensor and its Triton type. A number that a variable holds is a tensor without dimensions, as in Triton."""

    __slots__ = ("dtype", "tensor")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor, dtype: Any) -> None:
        self.tensor = tensor
        self.dtype = dtype

    @property
    def type(self) -> Any:
        """The type of the elements; it is its own ``scalar``."""
        return self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole tensor, not of a block."""
        return tuple(self.tensor.shape)

    def __bool__(self) -> bool:
        """Raises ConditionOnTensor for more than a number: Triton has no ``if`` on a block of elements."""
        if self.tensor.dim():
            raise ConditionOnTensor("`if` and `while` take no tensor, and Triton compiles none: use tl.where")
        return bool(self.tensor.item())

    def __index__(self) -> int:
        """The integer, of a number."""
        if self.tensor.dim() or not self.dtype.is_int():
            raise NotEvaluable("a tensor as an index or the bound of a loop")
        return int(self.tensor.item())

    def __neg__(self) -> Value:
        return self if self.dtype is INT1 else Value(-self.tensor, self.dtype)

    def __invert__(self) -> Value:
        if self.dtype.is_floating():
            raise TypeError(f"wrong type argument to unary invert ({self.dtype})")
        return Value(~self.tensor, self.dtype)

    def __not__(self) -> Value:
        return Value(~_truth(self), INT1)

    def __rshift__(self, other: Any) -> Value:
        first, second, dtype = paired_tensors(self, other)
        return Value(shift_right(first, second, dtype, self.dtype.is_int_signed()), dtype)

    def __rrshift__(self, other: Any) -> Value:
        first, second, dtype = paired_tensors(other, self)
        return Value(shift_right(first, second, dtype, self.dtype.is_int_signed()), dtype)

    def __getitem__(self, index: Any) -> Any:
        raise NotEvaluable("an index into a tensor")

    def logical_and(self, other: Any) -> Value:
        """Both, of two truth values."""
        return Value(_truth(self) & _truth(as_value(other)), INT1)

    def logical_or(self, other: Any) -> Value:
        """Either, of two truth values."""
        return Value(_truth(self) | _truth(as_value(other)), INT1)

    def to(self, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Value:
        """See ``cast``."""
        return cast(self, dtype, fp_downcast_rounding, bitcast)

    def cast(self, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Value:
        """See ``cast``."""
        return cast(self, dtype, fp_downcast_rounding, bitcast)


def _truth(value: Value) -> torch.Tensor:
    if value.dtype is not INT1:
        raise ValueError(f"a logical operator takes truth values, not {value.dtype}")
    return value.tensor


def as_value(value: Any) -> Value:
    """A value or a Python number as a value. Raises TypeError for anything else."""
    if value.__class__ is Value:
        return value
    dtype = type_of_number(value)
    return Value(tensor_of(value, dtype), dtype)


def cast(value: Any, dtype: Any, fp_downcast_rounding: str | None = None, as_bits: bool = False) -> Value:
    """``value`` converted to a type, or its bits taken as that type."""
    value, dtype = as_value(value), canonical(dtype)
    if as_bits:
        return Value(bitcast(value.tensor, value.dtype, dtype), dtype)
    if fp_downcast_rounding not in (None, "rtne"):
        raise NotEvaluable(f"rounding mode {fp_downcast_rounding}")
    return Value(convert(value.tensor, value.dtype, dtype), dtype)


def paired(first: Any, second: Any, divides: bool = False) -> tuple[Any, Any, Any]:
    """Two operands in the type in which Triton computes on them, and that type.

    Of two values it gives tensors; of a value and a Python number, a tensor and what torch takes beside it.
    """
    if first.__class__ is Value:
        if second.__class__ is Value:
            common = first.dtype if first.dtype is second.dtype else common_type(first.dtype, second.dtype, divides)
            return convert(first.tensor, first.dtype, common), convert(second.tensor, second.dtype, common), common
        common = number_in(first.dtype, second, divides)
        return convert(first.tensor, first.dtype, common), number_as(second, common), common
    if second.__class__ is Value:
        common = number_in(second.dtype, first, divides)
        return number_as(first, common), convert(second.tensor, second.dtype, common), common
    return paired(as_value(first), as_value(second), divides)


def paired_tensors(first: Any, second: Any, divides: bool = False) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The same with a tensor for a number too."""
    if first.__class__ is Value and second.__class__ is Value and first.dtype is second.dtype:
        return first.tensor, second.tensor, first.dtype
    left, right, common = paired(first, second, divides)
    storage = STORAGE[common.name]
    if not isinstance(left, torch.Tensor):
        left = torch.tensor(left, dtype=storage)
    if not isinstance(right, torch.Tensor):
        right = torch.tensor(right, dtype=storage)
    return left, right, common


def together(*values: Any) -> tuple[Value, ...]:
    """Three operands in the type in which Triton computes on them."""
    are_numbers = [value.__class__ is not Value for value in values]
    types = [value.dtype for value, is_number in zip(values, are_numbers) if not is_number]
    common = common_of_all(types, [value for value, is_number in zip(values, are_numbers) if is_number])
    return tuple(
        Value(tensor_of(value, common), common) if is_number else cast(value, common)
        for value, is_number in zip(values, are_numbers)
    )


def _operator(rule: Rule, divides: bool = False) -> tuple[Any, Any]:
    """A method of ``Value`` that computes by ``rule``, and the same with exchanged operands."""

    def method(self: Value, other: Any) -> Value:
        if other.__class__ is Value and other.dtype is self.dtype:
            return Value(*rule(self.tensor, other.tensor, self.dtype))
        return Value(*rule(*pair(self, other, divides)))

    def exchanged(self: Value, other: Any) -> Value:
        return Value(*rule(*pair(other, self, divides)))

    pair = paired_tensors if divides else paired
    return method, exchanged


for _name, _rule, _divides in (
    ("add", add, False),
    ("sub", subtract, False),
    ("mul", multiply, False),
    ("truediv", divide, True),
    ("floordiv", divide_integers, True),
    ("mod", remainder, True),
    ("and", bitwise_and, False),
    ("or", bitwise_or, False),
    ("xor", bitwise_xor, False),
    ("lshift", shift_left, False),
):
    _method, _exchanged = _operator(_rule, _divides)
    setattr(Value, f"__{_name}__", _method)
    setattr(Value, f"__r{_name}__", _exchanged)
for _name, _rule in (
    ("eq", equal),
    ("ne", not_equal),
    ("lt", less),
    ("le", less_equal),
    ("gt", greater),
    ("ge", greater_equal),
):
    setattr(Value, f"__{_name}__", _operator(_rule)[0])  # Python exchanges the operands of a comparison itself

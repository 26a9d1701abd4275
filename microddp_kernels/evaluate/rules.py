"""The arithmetic of Triton's operators on tensors (or a tensor and a number) that are of one Triton type already."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from microddp_kernels.evaluate.convert import convert
from microddp_kernels.evaluate.element_types import FP32, FP64, INT1, SIGN_BITS
from microddp_kernels.evaluate.errors import NotEvaluable
from microddp_kernels.evaluate.exact import float_remainder

__all__ = [
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "divide",
    "divide_integers",
    "equal",
    "flipped",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "multiply",
    "not_equal",
    "remainder",
    "shift_left",
    "shift_right",
    "subtract",
]

Result = tuple[torch.Tensor, Any]


def add(first: Any, second: Any, dtype: Any) -> Result:
    """The sum; integers wrap around, and truth values are integers of one bit."""
    return (first ^ second if dtype is INT1 else first + second), dtype


def subtract(first: Any, second: Any, dtype: Any) -> Result:
    """The difference."""
    return (first ^ second if dtype is INT1 else first - second), dtype


def multiply(first: Any, second: Any, dtype: Any) -> Result:
    """The product."""
    return (first & second if dtype is INT1 else first * second), dtype


def divide(first: torch.Tensor, second: torch.Tensor, dtype: Any) -> Result:
    """The quotient: correctly rounded, of two 16-bit floats or integers in float32."""
    if dtype is FP32 or dtype is FP64:
        return torch.true_divide(first, second), dtype
    return torch.true_divide(convert(first, dtype, FP32), convert(second, dtype, FP32)), FP32


def divide_integers(first: torch.Tensor, second: torch.Tensor, dtype: Any) -> Result:
    """The quotient of integers towards zero."""
    if dtype.is_floating() or dtype is INT1:
        raise TypeError(f"unexpected type {dtype} of //")
    if dtype.name == "uint64":
        raise NotEvaluable("the division of uint64 numbers")
    if dtype.name in SIGN_BITS:
        mask = (1 << dtype.primitive_bitwidth) - 1
        quotient = _quotient(first.long() & mask, second.long() & mask)
        return quotient.to(first.dtype), dtype
    if dtype.is_int_unsigned():
        return _quotient(first, second), dtype
    # The most negative number divided by -1 kills the process: it does not fit, and the processor traps.
    negated = second == -1
    quotient = _quotient(first, torch.where(negated, torch.ones_like(second), second))
    return torch.where(negated, -quotient, quotient), dtype


def _quotient(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Towards zero. By zero it is something, as on a GPU, where `tl.where` may leave it; torch would raise."""
    is_zero = second == 0
    quotient = torch.div(first, torch.where(is_zero, torch.ones_like(second), second), rounding_mode="trunc")
    return torch.where(is_zero, torch.zeros_like(quotient), quotient)


def remainder(first: torch.Tensor, second: torch.Tensor, dtype: Any) -> Result:
    """The remainder of a quotient towards zero: it has the sign of ``first``."""
    if dtype.is_floating():
        if dtype is FP32 or dtype is FP64:
            return float_remainder(first, second), dtype
        return float_remainder(first.float(), second.float()), FP32
    quotient, _ = divide_integers(first, second, dtype)
    return first - quotient * second, dtype


def _bitwise(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Result]:
    def rule(first: Any, second: Any, dtype: Any) -> Result:
        if dtype.is_floating():
            raise TypeError(f"invalid operands of type {dtype}: bitwise operators take integers")
        return apply(first, second), dtype

    return rule


bitwise_and = _bitwise(operator.and_)
bitwise_or = _bitwise(operator.or_)
bitwise_xor = _bitwise(operator.xor)
shift_left = _bitwise(operator.lshift)


def shift_right(first: torch.Tensor, second: torch.Tensor, dtype: Any, is_signed: bool) -> torch.Tensor:
    """``first >> second``; the sign is repeated if ``is_signed``, else zeros come in."""
    if dtype.is_floating():
        raise TypeError(f"invalid operands of type {dtype}: shifts take integers")
    stored_unsigned = first.dtype in (torch.uint8, torch.bool)
    if is_signed == (not stored_unsigned):
        return first >> second
    if is_signed or first.dtype == torch.bool:
        raise NotEvaluable(f"a shift of {dtype} beside another type")
    bits = 8 * first.element_size()
    # By one first: then the sign bit is clear, and the rest of an arithmetic shift brings in zeros.
    halved = (first >> 1) & ((1 << (bits - 1)) - 1)
    return torch.where(second == 0, first, halved >> (second - 1).clamp_(min=0))


def flipped(operand: Any, dtype: Any) -> Any:
    """An operand whose signed order is the order of its type."""
    sign_bit = SIGN_BITS.get(dtype.name)
    return operand if sign_bit is None else operand ^ sign_bit


def _comparison(compare: Callable[[Any, Any], Any], orders: bool) -> Callable[[Any, Any, Any], Result]:
    def rule(first: Any, second: Any, dtype: Any) -> Result:
        if orders and dtype.name in SIGN_BITS:
            first, second = flipped(first, dtype), flipped(second, dtype)
        return compare(first, second), INT1

    return rule


equal = _comparison(operator.eq, orders=False)
not_equal = _comparison(operator.ne, orders=False)
less = _comparison(operator.lt, orders=True)
less_equal = _comparison(operator.le, orders=True)
greater = _comparison(operator.gt, orders=True)
greater_equal = _comparison(operator.ge, orders=True)

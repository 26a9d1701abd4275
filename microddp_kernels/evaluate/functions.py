"""The elementwise functions of ``triton.language`` on values."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import triton.language as tl

from microddp_kernels.evaluate.convert import convert, tensor_of
from microddp_kernels.evaluate.element_types import FP32, FP64, INT1, INT32, SIGN_BITS, canonical
from microddp_kernels.evaluate.exact import fused_multiply_add, high_product, square_root
from microddp_kernels.evaluate.rules import divide, flipped
from microddp_kernels.evaluate.value import Value, as_value, cast, paired_tensors, together

__all__ = ["FUNCTIONS", "dynamic_range"]

_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL_NAN: Final = tl.PropagateNan.ALL
_NO_NAN: Final = tl.PropagateNan.NONE


def _float_function(apply: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    def function(x: Any) -> Value:
        value = as_value(x)
        if value.dtype is FP32 or value.dtype is FP64:
            return Value(apply(value.tensor), value.dtype)
        raise TypeError(f"expected float32 or float64, got {value.dtype}")

    return function


def _selecting(propagating: Any, ignoring: Any, of_signs: Any) -> Callable[..., Value]:
    """``minimum`` or ``maximum``; -0.0 is below 0.0, as PTX has it."""

    def function(x: Any, y: Any, propagate_nan: Any = _NO_NAN) -> Value:
        first, second, dtype = paired_tensors(x, y)
        if first.dtype.is_floating_point:
            select = propagating if propagate_nan is _ALL_NAN else ignoring
            return Value(_ordered(select, of_signs, first, second), dtype)
        if dtype.name in SIGN_BITS:
            return Value(flipped(propagating(flipped(first, dtype), flipped(second, dtype)), dtype), dtype)
        return Value(propagating(first, second), dtype)

    return function


def _ordered(select: Any, of_signs: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``select(first, second)``, where torch may return either of two zeros.

    Which one depends on the place and on the order of the operands. Taken in both orders the results differ in nothing
    but the signs of zeros (or what NaN holds), and as integers 0.0 is above -0.0. Integers are compared much faster
    than zeros are searched for.
    """
    found: torch.Tensor = select(first, second)
    bits = found.view(_BITS[found.element_size()])
    of_signs(bits, select(second, first).view(bits.dtype), out=bits)
    return found


minimum = _selecting(torch.minimum, torch.fmin, torch.minimum)
maximum = _selecting(torch.maximum, torch.fmax, torch.maximum)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = _NO_NAN) -> Value:
    """``x`` within the bounds; a NaN becomes ``min`` unless it is to propagate."""
    value, low, high = together(x, min, max)
    return minimum(maximum(value, low, propagate_nan), high, propagate_nan)


def absolute(x: Any) -> Value:
    """``abs``; that of the most negative integer is itself."""
    value = as_value(x)
    if not value.tensor.dtype.is_floating_point and value.dtype.is_int_unsigned():
        return value
    return Value(torch.abs(value.tensor), value.dtype)


def where(condition: Any, x: Any, y: Any) -> Value:
    """``x`` where ``condition`` is true (not zero), else ``y``."""
    chosen = as_value(condition)
    first, second, dtype = paired_tensors(x, y)
    return Value(torch.where(convert(chosen.tensor, chosen.dtype, INT1), first, second), dtype)


def _checked(dtype: Any, *legal: Any) -> Any:
    if dtype not in legal:
        raise TypeError(f"expected {' or '.join(map(str, legal))}, got {dtype}")
    return dtype


def fdiv(x: Any, y: Any, ieee_rounding: bool = False, approx: bool = False) -> Value:
    """The quotient of floats, correctly rounded whatever is asked."""
    if ieee_rounding and approx:
        raise ValueError("approx and ieee_rounding cannot both be True")
    first, second, dtype = paired_tensors(x, y, divides=True)
    if not dtype.is_floating():
        raise TypeError(f"fdiv takes floats, not {dtype}")
    return Value(*divide(first, second, dtype))


def div_rn(x: Any, y: Any) -> Value:
    """The correctly rounded quotient of float32 values."""
    first, second, dtype = paired_tensors(x, y)
    return Value(torch.true_divide(first, second), _checked(dtype, FP32))


def sqrt_rn(x: Any) -> Value:
    """The correctly rounded square root of float32 values."""
    value = as_value(x)
    return Value(square_root(value.tensor), _checked(value.dtype, FP32))


def fma(x: Any, y: Any, z: Any) -> Value:
    """``x * y + z``, rounded once."""
    first, second, third = together(x, y, z)
    return Value(fused_multiply_add(first.tensor, second.tensor, third.tensor, first.dtype), first.dtype)


def umulhi(x: Any, y: Any) -> Value:
    """The upper half of the product of unsigned integers of 32 or 64 bits."""
    first, second, dtype = paired_tensors(x, y)
    return Value(high_product(first, second, dtype), dtype)


def full(shape: Any, value: Any, dtype: Any) -> Value:
    """A tensor of one number."""
    dtype = canonical(dtype)
    number = cast(value, dtype).tensor if value.__class__ is Value else tensor_of(value, dtype)
    return Value(number.expand(tuple(int(size) for size in shape)), dtype)


def zeros(shape: Any, dtype: Any) -> Value:
    """A tensor of zeros."""
    return full(shape, 0, dtype)


def zeros_like(input: Any) -> Value:
    """A tensor of zeros of the shape and type of another."""
    return Value(torch.zeros_like(input.tensor), input.dtype)


def broadcast(input: Any, other: Any) -> tuple[Value, Value]:
    """Both in their common shape."""
    first, second = as_value(input), as_value(other)
    tensors = torch.broadcast_tensors(first.tensor, second.tensor)
    return Value(tensors[0], first.dtype), Value(tensors[1], second.dtype)


def _arithmetic(apply: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def function(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
        return apply(as_value(x) if y.__class__ is not Value else x, y)

    return function


_exp: Final = _float_function(torch.exp)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, by that formula."""
    one: Any = 1
    return one / (one + _exp(-x))


def static_assert(cond: Any, msg: str = "") -> None:
    """Raises AssertionError unless ``cond``."""
    if not cond:
        raise AssertionError(msg)


def dynamic_range(*bounds: Any, **options: Any) -> Iterator[Value]:
    """The counters of a loop that Triton does not unroll: int32 numbers, not constants."""
    step = options.pop("step", None)
    for counter in builtins.range(*(int(bound.__index__()) for bound in (*bounds, *(() if step is None else (step,))))):
        yield Value(torch.tensor(counter, dtype=torch.int32), INT32)


def _same(value: Any, *ignored: Any, **options: Any) -> Any:
    """A promise about a value changes nothing."""
    return value


def _nothing(*ignored: Any, **options: Any) -> None:
    """What is checked or shown by a compiler or in debugging only."""


def _unwrapped(value: Any) -> Any:
    return getattr(value, "value", value)


_ONE_ARGUMENT: Final = {
    "ceil": torch.ceil,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "floor": torch.floor,
    "log": torch.log,
    "log2": torch.log2,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
}

_MEMBERS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _float_function(apply) for name, apply in _ONE_ARGUMENT.items()},
    "abs": absolute,
    "cdiv": lambda x, div: (x + (div - 1)) // div,
    "sigmoid": sigmoid,
    "sqrt_rn": sqrt_rn,
}
for _name, _function in _MEMBERS.items():
    setattr(Value, _name, _function)

FUNCTIONS: Final[dict[str, Any]] = {
    **_MEMBERS,
    "PropagateNan": tl.PropagateNan,
    "add": _arithmetic(lambda x, y: x + y),
    "assume": _nothing,
    "broadcast": broadcast,
    "cast": lambda input, dtype, fp_downcast_rounding=None, bitcast=False: cast(
        input, dtype, fp_downcast_rounding, bitcast
    ),
    "clamp": clamp,
    "constexpr": _unwrapped,
    "device_assert": _nothing,
    "div_rn": div_rn,
    "expect_zero": _same,
    "fdiv": fdiv,
    "fma": fma,
    "full": full,
    "max_constancy": _same,
    "max_contiguous": _same,
    "maximum": maximum,
    "minimum": minimum,
    "mul": _arithmetic(lambda x, y: x * y),
    "multiple_of": _same,
    "range": dynamic_range,
    "static_assert": static_assert,
    "static_print": _nothing,
    "static_range": lambda *bounds: builtins.range(*bounds),
    "sub": _arithmetic(lambda x, y: x - y),
    "tensor": Value,
    "to_tensor": as_value,
    "umulhi": umulhi,
    "where": where,
    "zeros": zeros,
    "zeros_like": zeros_like,
}
"""By name in ``triton.language``."""

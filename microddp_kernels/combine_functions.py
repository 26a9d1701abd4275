"""The combine functions of the built-in operators. ``@triton.jit`` functions only."""

# mypy: ignore-errors
# (Triton's decorator is untyped, and no annotation describes blocks of values.)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "maximum",
    "minimum",
    "multiply",
    "multiply_complex",
]


@triton.jit
def add(first, second):
    """The combine function of ``sum`` and ``avg``."""
    return first + second


@triton.jit
def multiply(first, second):
    """The combine function of ``prod``."""
    return first * second


@triton.jit
def multiply_complex(first, second):
    """The combine function of ``prod`` on complex elements, tuples (real, imaginary): the plain formula."""
    first_real, first_imaginary = first
    second_real, second_imaginary = second
    real = first_real * second_real - first_imaginary * second_imaginary
    imaginary = first_real * second_imaginary + first_imaginary * second_real
    return real, imaginary


@triton.jit
def bitwise_and(first, second):
    """The combine function of ``band``."""
    return first & second


@triton.jit
def bitwise_or(first, second):
    """The combine function of ``bor``."""
    return first | second


@triton.jit
def bitwise_xor(first, second):
    """The combine function of ``bxor``."""
    return first ^ second


@triton.jit
def maximum(first, second):
    """The combine function of ``max``: NaN propagates and -0.0 is below +0.0.

    Which of two zeros a machine's maximum returns depends on the machine and on the order of the operands. Taken in
    both orders, the results differ in nothing but the signs of zeros (or the payload of NaN), and as integers +0.0 is
    the larger.
    """
    forward = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    if first.dtype.is_floating():
        bits: tl.constexpr = tl.int64 if first.dtype == tl.float64 else tl.int32
        backward = tl.maximum(second, first, propagate_nan=tl.PropagateNan.ALL)
        larger = tl.maximum(forward.to(bits, bitcast=True), backward.to(bits, bitcast=True))
        return larger.to(first.dtype, bitcast=True)
    else:
        return forward


@triton.jit
def minimum(first, second):
    """The combine function of ``min``: NaN propagates and -0.0 is below +0.0 (see ``maximum``)."""
    forward = tl.minimum(first, second, propagate_nan=tl.PropagateNan.ALL)
    if first.dtype.is_floating():
        bits: tl.constexpr = tl.int64 if first.dtype == tl.float64 else tl.int32
        backward = tl.minimum(second, first, propagate_nan=tl.PropagateNan.ALL)
        smaller = tl.minimum(forward.to(bits, bitcast=True), backward.to(bits, bitcast=True))
        return smaller.to(first.dtype, bitcast=True)
    else:
        return forward

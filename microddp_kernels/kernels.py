"""The Triton kernels and combine functions. ``@triton.jit`` functions only; launchers decide how they run.

Shapes: every pointer is the start of a 1-D contiguous run of ``numel`` elements, ``numel`` at least 1. Program ``i``
does elements ``i * BLOCK`` up to ``(i + 1) * BLOCK``, in 64-bit offsets. A block that is known to be full is loaded and
stored without a mask, so that accesses compile to 128 bits whatever ``numel`` is; the one block that may not be full
takes the masked path.

bool tensors come as uint8 with ``IS_BOOL`` set and are computed as int32 zeros and ones: Triton's interpreter adds
raw bool and bfloat16 values wrongly, so nothing is computed before it has been widened to ``ACC``. The interpreter also
truncates where it should round to bfloat16, and mistakes its subnormals; with ``SOFT_BFLOAT16`` the conversions are
done on the bits, to the results that a GPU gives.
"""

# mypy: ignore-errors
# (Triton's decorator is untyped, and a kernel's parameters are pointers and constants that no annotation describes.)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "combine_kernel",
    "copy_kernel",
    "fold_kernel",
    "maximum",
    "minimum",
    "multiply",
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


@triton.jit
def _widen(value, ACC: tl.constexpr, IS_BOOL: tl.constexpr, SOFT_BFLOAT16: tl.constexpr):
    """``value`` in the accumulation type; truth values as 0 and 1."""
    if IS_BOOL:
        return (value != 0).to(ACC)
    elif SOFT_BFLOAT16 and value.dtype == tl.bfloat16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(ACC)
    else:
        return value.to(ACC)


@triton.jit
def _narrow(value, TYPE: tl.constexpr, SOFT_BFLOAT16: tl.constexpr):
    """``value`` rounded to the nearest of ``TYPE``, ties to even."""
    if SOFT_BFLOAT16 and TYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        quiet_nan = 0x7FC0
        return tl.where(value == value, rounded, quiet_nan).to(tl.uint16).to(TYPE, bitcast=True)
    else:
        return value.to(TYPE)


@triton.jit
def _combine(first, second, COMBINE: tl.constexpr, ACC: tl.constexpr, IS_BOOL: tl.constexpr):
    """One step of a fold, in the accumulation type whatever type the combine function returns."""
    return _widen(COMBINE(first, second), ACC, IS_BOOL, False)


@triton.jit
def _divide(value, denominator, ACC: tl.constexpr):
    """The correctly rounded quotient: a plain float32 ``/`` compiles to an approximate division."""
    if ACC == tl.float32:
        return tl.div_rn(value, tl.cast(denominator, ACC))
    else:
        return value / tl.cast(denominator, ACC)


@triton.jit
def _fold(
    values,
    weights,
    denominator,
    COMBINE: tl.constexpr,
    ACC: tl.constexpr,
    IS_BOOL: tl.constexpr,
    SOFT_BFLOAT16: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """The values folded from the left: combined, or weighted and summed; then divided if asked."""
    total = _widen(values[0], ACC, IS_BOOL, SOFT_BFLOAT16)
    if WEIGHTED:
        total = total * weights[0]
    for index in tl.static_range(1, len(values)):
        value = _widen(values[index], ACC, IS_BOOL, SOFT_BFLOAT16)
        if WEIGHTED:
            total = total + value * weights[index]
        else:
            total = _combine(total, value, COMBINE, ACC, IS_BOOL)
    if DIVIDES:
        total = _divide(total, denominator, ACC)
    return total


@triton.jit(do_not_specialize=["numel"])
def combine_kernel(
    out,
    first,
    second,
    numel,
    COMBINE: tl.constexpr,
    ACC: tl.constexpr,
    IS_BOOL: tl.constexpr,
    SOFT_BFLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out = COMBINE(first, second)`` in the type ``ACC``, rounded once to the type of ``out``.

    ``out`` may be exactly ``first`` or ``second``.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= numel:
        left = _widen(tl.load(first + offsets), ACC, IS_BOOL, SOFT_BFLOAT16)
        right = _widen(tl.load(second + offsets), ACC, IS_BOOL, SOFT_BFLOAT16)
        total = _combine(left, right, COMBINE, ACC, IS_BOOL)
        tl.store(out + offsets, _narrow(total, out.dtype.element_ty, SOFT_BFLOAT16))
    else:
        mask = offsets < numel
        left = _widen(tl.load(first + offsets, mask=mask), ACC, IS_BOOL, SOFT_BFLOAT16)
        right = _widen(tl.load(second + offsets, mask=mask), ACC, IS_BOOL, SOFT_BFLOAT16)
        total = _combine(left, right, COMBINE, ACC, IS_BOOL)
        tl.store(out + offsets, _narrow(total, out.dtype.element_ty, SOFT_BFLOAT16), mask=mask)


@triton.jit
def _load_all(pointers, offsets, mask, MASKED: tl.constexpr):
    """The values behind every pointer, as a tuple."""
    values = ()
    for index in tl.static_range(len(pointers)):
        if MASKED:
            values = values + (tl.load(pointers[index] + offsets, mask=mask),)
        else:
            values = values + (tl.load(pointers[index] + offsets),)
    return values


@triton.jit(do_not_specialize=["numel", "denominator"])
def fold_kernel(
    out,
    operands,
    weights,
    denominator,
    numel,
    COMBINE: tl.constexpr,
    ACC: tl.constexpr,
    IS_BOOL: tl.constexpr,
    SOFT_BFLOAT16: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out`` = the fold from the left over ``operands``, a tuple of pointers, rounded once to the type of ``out``.

    With ``WEIGHTED`` the value is the sum of ``weights[i] * operands[i]`` (the weights are a tuple of floats), else
    ``COMBINE`` folded; with ``DIVIDES`` it is divided by ``denominator``. ``out`` may be exactly any operand: a block
    is read whole before it is written.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    if (block + 1) * BLOCK <= numel:
        values = _load_all(operands, offsets, mask, False)
        total = _fold(values, weights, denominator, COMBINE, ACC, IS_BOOL, SOFT_BFLOAT16, WEIGHTED, DIVIDES)
        tl.store(out + offsets, _narrow(total, out.dtype.element_ty, SOFT_BFLOAT16))
    else:
        values = _load_all(operands, offsets, mask, True)
        total = _fold(values, weights, denominator, COMBINE, ACC, IS_BOOL, SOFT_BFLOAT16, WEIGHTED, DIVIDES)
        tl.store(out + offsets, _narrow(total, out.dtype.element_ty, SOFT_BFLOAT16), mask=mask)


@triton.jit(do_not_specialize=["numel"])
def copy_kernel(out, source, numel, BLOCK: tl.constexpr):
    """``out = source``, of one type."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= numel:
        tl.store(out + offsets, tl.load(source + offsets))
    else:
        mask = offsets < numel
        tl.store(out + offsets, tl.load(source + offsets, mask=mask), mask=mask)

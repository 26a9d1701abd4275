"""What the combining kernels are made of: values in and out, and folds of them. ``@triton.jit`` functions only.

Here *values* are a tuple of blocks in accumulation types, one a lane. A complex element is two values, its real and its
imaginary part, behind one pointer (``IS_COMPLEX``). ``ACC`` holds the accumulation type of each value and ``FORMATS``
how each is read or written (see ``convert``).
"""

# mypy: ignore-errors
# (Triton's decorator is untyped, and no annotation describes pointers and blocks of values.)

from __future__ import annotations

import triton
import triton.language as tl

from microddp_kernels.convert import narrow, widen

__all__ = ["combined", "finish", "fold", "load_lanes", "load_values", "settle", "store_lanes", "store_values"]


@triton.jit
def load_values(
    pointers,
    block,
    numel,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_COMPLEX: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The values of ``BLOCK`` elements of one operand."""
    if IS_COMPLEX:
        offsets = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        if MASKED:
            parts = tl.load(pointers[0] + offsets, mask=offsets < 2 * numel)
        else:
            parts = tl.load(pointers[0] + offsets)
        real, imaginary = tl.split(tl.reshape(parts, (BLOCK, 2)))
        return real, imaginary
    else:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        return load_lanes(pointers, offsets, offsets < numel, ACC, FORMATS, MASKED)


@triton.jit
def load_lanes(pointers, offsets, mask, ACC: tl.constexpr, FORMATS: tl.constexpr, MASKED: tl.constexpr):
    """The values behind each pointer at ``offsets``."""
    values = ()
    for lane in tl.static_range(len(pointers)):
        if MASKED:
            value = tl.load(pointers[lane] + offsets, mask=mask)
        else:
            value = tl.load(pointers[lane] + offsets)
        values = values + (widen(value, ACC[lane], FORMATS[lane]),)
    return values


@triton.jit
def store_values(
    pointers,
    values,
    block,
    numel,
    FORMATS: tl.constexpr,
    IS_COMPLEX: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inverse of ``load_values``."""
    if IS_COMPLEX:
        offsets = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        parts = tl.reshape(tl.join(values[0], values[1]), (2 * BLOCK,))
        if MASKED:
            tl.store(pointers[0] + offsets, parts, mask=offsets < 2 * numel)
        else:
            tl.store(pointers[0] + offsets, parts)
    else:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        store_lanes(pointers, values, offsets, offsets < numel, FORMATS, MASKED)


@triton.jit
def store_lanes(pointers, values, offsets, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr):
    """Each value, rounded, behind its pointer at ``offsets``."""
    for lane in tl.static_range(len(pointers)):
        value = narrow(values[lane], pointers[lane].dtype.element_ty, FORMATS[lane])
        if MASKED:
            tl.store(pointers[lane] + offsets, value, mask=mask)
        else:
            tl.store(pointers[lane] + offsets, value)


@triton.jit
def settle(results, ACC: tl.constexpr, FORMATS: tl.constexpr, IS_BARE: tl.constexpr):
    """What a user's function returned as values: of the accumulation types, whatever types they have."""
    if IS_BARE:
        return (_settled(results, ACC[0], FORMATS[0]),)
    else:
        tl.static_assert(not isinstance(results, tl.tensor), "the function must return a tuple, a value a lane")
        tl.static_assert(len(results) == len(ACC), "the function must return one value for each lane")
        values = ()
        for lane in tl.static_range(len(ACC)):
            values = values + (_settled(results[lane], ACC[lane], FORMATS[lane]),)
        return values


@triton.jit
def _settled(result, ACC: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == "bool":
        return (result != 0).to(ACC)
    else:
        return tl.cast(result, ACC)


@triton.jit
def combined(first, second, COMBINE: tl.constexpr, ACC: tl.constexpr, FORMATS: tl.constexpr, IS_BARE: tl.constexpr):
    """One step of a fold. With ``IS_BARE`` the combine function takes and returns values that are in no tuple."""
    if IS_BARE:
        return settle(COMBINE(first[0], second[0]), ACC, FORMATS, True)
    else:
        return settle(COMBINE(first, second), ACC, FORMATS, False)


@triton.jit
def fold(
    operands,
    weights,
    COMBINE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_BARE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """The values of each operand folded from the left: combined; or, of one lane, weighted and summed."""
    total = operands[0]
    if WEIGHTED:
        total = (total[0] * weights[0],)
    for index in tl.static_range(1, len(operands)):
        if WEIGHTED:
            total = (total[0] + operands[index][0] * weights[index],)
        else:
            total = combined(total, operands[index], COMBINE, ACC, FORMATS, IS_BARE)
    return total


@triton.jit
def finish(
    values,
    scale,
    world_size,
    FINALIZE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_BARE: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """What is done to a complete fold: scaled, then finalized or divided, each if asked."""
    if SCALED:
        values = _scaled(values, scale, ACC)
    if FINALIZE is not None:
        if IS_BARE:
            values = settle(FINALIZE(values[0], world_size), ACC, FORMATS, True)
        else:
            values = settle(FINALIZE(values, world_size), ACC, FORMATS, False)
    elif DIVIDES:
        values = _divided(values, world_size, ACC)
    return values


@triton.jit
def _scaled(values, scale, ACC: tl.constexpr):
    """``scale`` holds the bits of a float64: a Python float would arrive as float32."""
    factor = scale.to(tl.int64).to(tl.float64, bitcast=True)
    products = ()
    for index in tl.static_range(len(values)):
        products = products + (values[index] * factor.to(ACC[index]),)
    return products


@triton.jit
def _divided(values, denominator, ACC: tl.constexpr):
    """The correctly rounded quotients: a plain float32 ``/`` compiles to an approximate division."""
    quotients = ()
    for index in tl.static_range(len(values)):
        if ACC[index] == tl.float32:
            quotient = tl.div_rn(values[index], tl.cast(denominator, tl.float32))
        else:
            quotient = values[index] / tl.cast(denominator, ACC[index])
        quotients = quotients + (quotient,)
    return quotients

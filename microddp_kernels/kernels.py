"""The Triton kernels that combine, and the combine functions. ``@triton.jit`` functions only; launchers run them.

Shapes: every pointer is the start of a 1-D contiguous run of ``numel`` elements, ``numel`` at least 1. Program ``i``
does elements ``i * BLOCK`` up to ``(i + 1) * BLOCK``, in 64-bit offsets. A block that is known to be full is loaded and
stored without a mask, so that accesses compile to 128 bits whatever ``numel`` is; the one block that may not be full
takes the masked path.

An operand is a tuple of pointers, one a lane. ``FORMATS`` tells how the elements behind each pointer are read and
written, for ``outs`` and then for each operand; nothing is computed before it has been widened to ``ACC``, one type for
each lane. With ``IS_COMPLEX`` there is one lane of floats, two for each element, and ``numel`` counts the
elements. With ``IS_BARE`` the operator's functions take and return blocks, else tuples of them.
"""

# mypy: ignore-errors
# (Triton's decorator is untyped, and a kernel's parameters are pointers and constants that no annotation describes.)

from __future__ import annotations

import triton
import triton.language as tl

from microddp_kernels.combine_functions import (
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    maximum,
    minimum,
    multiply,
    multiply_complex,
)
from microddp_kernels.fold import combined, finish, fold, load_values, store_values

__all__ = [
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "combine_kernel",
    "fold_kernel",
    "maximum",
    "minimum",
    "multiply",
    "multiply_complex",
]


@triton.jit
def _combine_block(
    outs,
    first,
    second,
    block,
    numel,
    COMBINE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_BARE: tl.constexpr,
    IS_COMPLEX: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    left = load_values(first, block, numel, ACC, FORMATS[1], IS_COMPLEX, MASKED, BLOCK)
    right = load_values(second, block, numel, ACC, FORMATS[2], IS_COMPLEX, MASKED, BLOCK)
    total = combined(left, right, COMBINE, ACC, FORMATS[0], IS_BARE)
    store_values(outs, total, block, numel, FORMATS[0], IS_COMPLEX, MASKED, BLOCK)


@triton.jit(do_not_specialize=["numel"])
def combine_kernel(
    outs,
    first,
    second,
    numel: tl.int64,
    COMBINE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_BARE: tl.constexpr,
    IS_COMPLEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``outs = COMBINE(first, second)`` in the types ``ACC``, rounded once to the types of ``outs``.

    ``outs`` may be exactly ``first`` or ``second``: a block is read whole before it is written.
    """
    block = tl.program_id(0).to(tl.int64)
    if (block + 1) * BLOCK <= numel:
        _combine_block(outs, first, second, block, numel, COMBINE, ACC, FORMATS, IS_BARE, IS_COMPLEX, False, BLOCK)
    else:
        _combine_block(outs, first, second, block, numel, COMBINE, ACC, FORMATS, IS_BARE, IS_COMPLEX, True, BLOCK)


@triton.jit
def _fold_block(
    outs,
    operands,
    weights,
    scale,
    world_size,
    block,
    numel,
    COMBINE: tl.constexpr,
    FINALIZE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_BARE: tl.constexpr,
    IS_COMPLEX: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    values = ()
    for index in tl.static_range(len(operands)):
        loaded = load_values(operands[index], block, numel, ACC, FORMATS[index + 1], IS_COMPLEX, MASKED, BLOCK)
        values = values + (loaded,)
    total = fold(values, weights, COMBINE, ACC, FORMATS[0], IS_BARE, WEIGHTED)
    total = finish(total, scale, world_size, FINALIZE, ACC, FORMATS[0], IS_BARE, SCALED, DIVIDES)
    store_values(outs, total, block, numel, FORMATS[0], IS_COMPLEX, MASKED, BLOCK)


@triton.jit(do_not_specialize=["scale", "world_size", "numel"])
def fold_kernel(
    outs,
    operands,
    weights,
    scale: tl.int64,
    world_size: tl.int32,
    numel: tl.int64,
    COMBINE: tl.constexpr,
    FINALIZE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    IS_BARE: tl.constexpr,
    IS_COMPLEX: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``outs`` = the fold from the left over ``operands``, a tuple of operands, rounded once to the types of ``outs``.

    With ``WEIGHTED`` the value is the sum of ``weights[i] * operands[i]`` (the weights are a tuple of floats), else
    ``COMBINE`` folded; with ``SCALED`` it is multiplied by the float64 whose bits are ``scale``; then it is what
    ``FINALIZE``, if not None, makes of it and ``world_size``, or with ``DIVIDES`` divided by ``world_size``. ``outs``
    may be exactly any operand: a block is read whole before it is written.
    """
    block = tl.program_id(0).to(tl.int64)
    if (block + 1) * BLOCK <= numel:
        _fold_block(
            outs, operands, weights, scale, world_size, block, numel,
            COMBINE, FINALIZE, ACC, FORMATS, IS_BARE, IS_COMPLEX, WEIGHTED, SCALED, DIVIDES, False, BLOCK,
        )  # fmt: skip
    else:
        _fold_block(
            outs, operands, weights, scale, world_size, block, numel,
            COMBINE, FINALIZE, ACC, FORMATS, IS_BARE, IS_COMPLEX, WEIGHTED, SCALED, DIVIDES, True, BLOCK,
        )  # fmt: skip

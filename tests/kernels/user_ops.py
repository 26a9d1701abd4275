"""Triton functions as users write them, from a module of their own: the operators that are declared and evaluated."""

# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language import maximum as larger
from triton.language.extra import libdevice

from tests.kernels import user_ops_helpers

ALPHA = tl.constexpr(0.1)
ROUNDS = tl.constexpr(3)
NOTHING = tl.constexpr(None)
IS_SCALED = tl.constexpr(True)


@triton.jit
def scaled(value, factor: tl.constexpr = ALPHA):
    return value * factor


@triton.jit
def largest(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def helped(a, b):
    """Helpers of this module and another, one with a default, one given a constant; constants of a module."""
    return scaled(a) + scaled(b, 0.5) + user_ops_helpers.plus_one(a) * math.pi + user_ops_helpers.OFFSET


@triton.jit
def imported(a, b):
    return larger(a, b) + libdevice.tanh(a) + tl.math.exp(-tl.math.abs(b))


@triton.jit
def assigned(a, b):
    """Numbers that variables hold have types: in float64 ``tenth`` is a float32 rounded to its 24 bits."""
    tenth = 0.1
    half: tl.constexpr = 0.1
    total = a * tenth + b * half
    total += 1
    return total


@triton.jit
def looped(a, b):
    total = a
    for index in tl.static_range(ROUNDS):
        total = total + b * index
    for index in range(2):
        total = total + index
    steps = 0
    while steps < 2:
        total = total + b
        steps += 1
    return total


@triton.jit
def chosen(a, b):
    """Conditions on constants: types, globals, None."""
    if a.dtype == tl.float64 and IS_SCALED:
        result = a + b
    elif a.dtype.is_floating():
        result = a - b
    elif NOTHING is None and not a.dtype.is_int_unsigned():
        result = a * b
    else:
        result = a
    return result if ROUNDS.value == 3 else b


@triton.jit
def logical(a, b):
    both = (a > b) and (b > 0)
    between = 0 < a < 10
    neither = not (both or between)
    return tl.where(neither, a, tl.where(between, b, a + b))


@triton.jit
def pair(a, b):
    """Two lanes: the larger first value with its second."""
    first, mark = a
    other, other_mark = b
    takes_other = other > first
    return tl.where(takes_other, other, first), tl.where(takes_other, other_mark, mark)


@triton.jit
def exchanged(a, b):
    """Returns operands as they came, in other lanes."""
    return b[1], a[0]


@triton.jit
def rows(a, b):
    """A narrow lane and a wide one."""
    weight, values = a
    other_weight, others = b
    total = weight + other_weight
    return total, (values * weight + others * other_weight) / total


@triton.jit
def broadcast_rows(a, b):
    """Wrong: what the narrow lane gets depends on the wide one."""
    return a[0] + b[1], a[1]


@triton.jit
def second(a, b):
    return b


@triton.jit
def two(a, b):
    """Two values, whatever it is given."""
    return 1, 2


@triton.jit
def constant(a, b):
    return 2.5


@triton.jit
def truth(a, b):
    return a > b


@triton.jit
def mean(value, world_size):
    if world_size > 1:
        value = value / world_size
    return value


@triton.jit
def means(values, world_size):
    return values[0] / world_size, values[1] + world_size


@triton.jit
def by_assembler(a, b):
    return tl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def if_float_by_assembler(a, b):
    """What it cannot evaluate is not reached on integers."""
    if a.dtype.is_floating():
        return by_assembler(a, b)
    else:
        return a + b

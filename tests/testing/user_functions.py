"""Triton functions as users write them, right ones and wrong ones."""

# mypy: ignore-errors
# (Triton's decorator is untyped.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def add(first, second):
    return first + second


@triton.jit
def subtract(first, second):
    return first - second


@triton.jit
def mean_of_two(first, second):
    return (first + second) * 0.5


@triton.jit
def larger(first, second):
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_number(first, second):
    return tl.maximum(first, second)


@triton.jit
def larger_of_equal_ones_the_second(first, second):
    """Neither NaN nor order of zeros."""
    return tl.where((first > second) | (first != first), first, second)


@triton.jit
def larger_by_comparison(first, second):
    return tl.where(first > second, first, second)


@triton.jit
def largest_size(first, second):
    return tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def times_and_plus(first, second):
    return first * second + first


@triton.jit
def saturating_add(first, second):
    total = first + second
    overflows = ((first > 0) & (second > 0) & (total < 0)) | ((first < 0) & (second < 0) & (total >= 0))
    limit = tl.where(first > 0, 2147483647, -2147483648)
    return tl.where(overflows, limit, total).to(first.dtype)


@triton.jit
def add_through_integers(first, second):
    return (first.to(tl.int32) + second.to(tl.int32)).to(first.dtype)


@triton.jit
def add_in_float16(first, second):
    return (first.to(tl.float16) + second.to(tl.float16)).to(first.dtype)


@triton.jit
def add_flushing_the_first(first, second):
    return tl.where(tl.abs(first) < SMALLEST_NORMAL, 0.0, first) + second


@triton.jit
def add_flushing_the_sum(first, second):
    total = first + second
    return tl.where(tl.abs(total) < SMALLEST_NORMAL, 0.0, total)


@triton.jit
def add_unless_large(first, second):
    total = first + second
    return tl.where(tl.abs(first) > 1e30, first, total)


@triton.jit
def add_losing_the_sign_of_zero(first, second):
    return (first + second) + 0.0


@triton.jit
def implies(first, second):
    return (first == 0) | (second != 0)


@triton.jit
def length(first, second):
    return tl.sqrt(first * first + second * second)


@triton.jit
def add_exponentials(first, second):
    return tl.log(tl.exp(first) + tl.exp(second))


@triton.jit
def log_of_sum(first, second):
    larger_one = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    return larger_one + tl.log(tl.exp(first - larger_one) + tl.exp(second - larger_one))


@triton.jit
def halved(value, world_size):
    return value * 0.5


@triton.jit
def per_rank(value, world_size):
    return value * world_size + 1


@triton.jit
def argmax_first_wins(first, second):
    value, index = first
    other, other_index = second
    takes_second = other > value
    return tl.where(takes_second, other, value), tl.where(takes_second, other_index, index)


@triton.jit
def argmax_forgetting_nan(first, second):
    value, index = first
    other, other_index = second
    takes_second = (other > value) | ((other == value) & (other_index < index))
    return tl.where(takes_second, other, value), tl.where(takes_second, other_index, index)


@triton.jit
def sum_and_product(first, second):
    return first[0] + second[0], first[1] * second[1]


@triton.jit
def matrix_product(first, second):
    a, b, c, d = first
    e, f, g, h = second
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@triton.jit
def welford_unguarded(first, second):
    mean, deviations, count = first
    other_mean, other_deviations, other_count = second
    total = count + other_count
    distance = other_mean - mean
    merged = deviations + other_deviations + distance * distance * count * other_count / total
    return mean + distance * other_count / total, merged, total


@triton.jit
def welford_misweighted(first, second):
    mean, deviations, count = first
    other_mean, other_deviations, other_count = second
    total = count + other_count
    share = other_count / tl.where(total == 0, 1, total)
    distance = other_mean - mean
    merged = deviations + other_deviations + distance * distance * count * share * share
    return mean + distance * share, merged, total


@triton.jit
def scaled_rows(first, second):
    weight, rows = first
    other_weight, other_rows = second
    return weight + other_weight, rows * weight + other_rows * other_weight


@triton.jit
def added_rows(first, second):
    weight, rows = first
    other_weight, other_rows = second
    return weight + other_weight, rows + other_rows


@triton.jit
def quaternion_product(first, second):
    w, x, y, z = first
    a, b, c, d = second
    return (
        w * a - x * b - y * c - z * d,
        w * b + x * a + y * d - z * c,
        w * c - x * d + y * a + z * b,
        w * d + x * c - y * b + z * a,
    )


@triton.jit
def max_plus_product(first, second):
    """Of two matrices whose four elements are the lanes, row by row."""
    a, b, c, d = first
    e, f, g, h = second
    return larger(a + e, b + g), larger(a + f, b + h), larger(c + e, d + g), larger(c + f, d + h)


@triton.jit
def compensated_add(first, second):
    """A sum, and what rounding took from it (D. E. Knuth's two-sum)."""
    total = first[0] + second[0]
    part = total - first[0]
    return total, first[1] + second[1] + ((first[0] - (total - part)) + (second[0] - part))


@triton.jit
def length_in_float32(first, second):
    """Of functions that take no other type."""
    return tl.sqrt_rn(first * first + second * second)


@triton.jit
def half_of_the_first_added(first, second):
    return tl.div_rn(first, 2.0) + second


@triton.jit
def length_of_libdevice(first, second):
    return libdevice.hypot(first, second)


@triton.jit
def negated_where_lanes_are_equal(first, second):
    """Of two states with equal lanes each, the third ones are subtracted."""
    both = (first[0] == first[1]) & (second[0] == second[1]) & (first[0] != second[0])
    total = first[2] + second[2]
    return first[0] + second[0], first[1] + second[1], tl.where(both, -total, total)

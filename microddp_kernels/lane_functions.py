"""The combine functions of the operators in ``lane_operators``. ``@triton.jit`` functions only."""

# mypy: ignore-errors
# (Triton's decorator is untyped, and a kernel's parameters are values and constants that no annotation describes.)

from __future__ import annotations

import triton
import triton.language as tl

from microddp_kernels.combine_functions import maximum

__all__ = [
    "absmax",
    "absolute",
    "argmax",
    "argmin",
    "logaddexp",
    "logsumexp",
    "softmax_merge",
    "welford",
]


@triton.jit
def _quotient(numerator, denominator):
    """The correctly rounded quotient of floats: a plain float32 ``/`` compiles to an approximate division."""
    if numerator.dtype == tl.float32 and denominator.dtype == tl.float32:
        return tl.div_rn(numerator, denominator)
    else:
        return numerator / denominator


@triton.jit
def _zero_order(value):
    """For ordering equal values: -0.0 below +0.0. What is equal otherwise has equal bits."""
    if value.dtype == tl.float64:
        return value.to(tl.int64, bitcast=True)
    elif value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True)
    else:
        return value


@triton.jit
def _takes_second(is_better, first, second, index, other_index):
    """Whether the second of two (value, index) is chosen: better, or NaN beside a number, or equal with a lower index.

    Of zeros that share even the index, +0.0 is taken, so that the choice never depends on the order of the operands.
    """
    first_is_nan = first != first
    second_is_nan = second != second
    wins = is_better | (second_is_nan & (first == first))
    ties = (first == second) | (first_is_nan & second_is_nan)
    is_lower = (other_index < index) | ((other_index == index) & (_zero_order(second) > _zero_order(first)))
    return wins | (ties & is_lower)


@triton.jit
def argmax(first, second):
    """The larger of two values with its index. NaN is the largest of all; ties go to the lowest index."""
    value, index = first
    other, other_index = second
    takes_second = _takes_second(other > value, value, other, index, other_index)
    return tl.where(takes_second, other, value), tl.where(takes_second, other_index, index)


@triton.jit
def argmin(first, second):
    """The smaller of two values with its index. NaN is the smallest of all; ties go to the lowest index."""
    value, index = first
    other, other_index = second
    takes_second = _takes_second(other < value, value, other, index, other_index)
    return tl.where(takes_second, other, value), tl.where(takes_second, other_index, index)


@triton.jit
def welford(first, second):
    """Mean, sum of squared deviations and count of two samples put together.

    The mean moves from that of the larger sample, which keeps the rounding of the correction small. Of samples of one
    size it is the one with the larger mean, so that the result never depends on the order of the operands.
    """
    mean, deviations, count = first
    other_mean, other_deviations, other_count = second
    is_second = (other_count > count) | ((other_count == count) & (other_mean > mean))
    near = tl.where(is_second, other_mean, mean)
    far = tl.where(is_second, mean, other_mean)
    large = tl.where(is_second, other_count, count).to(mean.dtype)
    small = tl.where(is_second, count, other_count).to(mean.dtype)
    total = large + small
    share = _quotient(small, tl.where(total == 0, total + 1, total))
    distance = far - near
    # An infinite mean stays what it is: moved by an infinite distance it would be NaN.
    moved = tl.where(tl.abs(near) == float("inf"), near + far, near + distance * share)
    # A sample of no elements has no mean: whatever its mean and deviations hold, often NaN, is not looked at.
    is_one_sample = small == 0
    merged_mean = tl.where(is_one_sample, near, moved)
    # The last term is zero, and NaN where the mean is not finite: deviations from that are undefined.
    merged = (deviations + other_deviations) + distance * distance * (large * share) + (moved - moved)
    kept = tl.where(is_second, other_deviations, deviations)
    is_empty = total == 0
    return (
        tl.where(is_empty, tl.zeros_like(merged_mean), merged_mean),
        tl.where(is_empty, tl.zeros_like(merged), tl.where(is_one_sample, kept, merged)),
        count + other_count,
    )


@triton.jit
def _rescaled(highest, total, merged_highest):
    """A sum of exponentials relative to ``highest``, made relative to ``merged_highest``. Nothing if that is -inf."""
    # Equal ones need no exponential, and infinite ones would give NaN.
    factor = tl.where(highest == merged_highest, 1.0, tl.exp(highest - merged_highest))
    return tl.where(highest == float("-inf"), 0.0, total * factor)


@triton.jit
def logsumexp(first, second):
    """The largest of two sets and the sum of their exponentials relative to it."""
    highest, total = first
    other_highest, other_total = second
    merged = maximum(highest, other_highest)
    return merged, _rescaled(highest, total, merged) + _rescaled(other_highest, other_total, merged)


@triton.jit
def softmax_merge(first, second):
    """Softmax-weighted means over two sets of keys, put together: largest score, sum of exponentials, mean."""
    highest, total, mean = first
    other_highest, other_total, other_mean = second
    merged = maximum(highest, other_highest)
    weight = _rescaled(highest, total, merged)
    other_weight = _rescaled(other_highest, other_total, merged)
    merged_total = weight + other_weight
    divisor = tl.where(merged_total == 0, merged_total + 1, merged_total)
    # A row without keys has no mean: what it holds, often NaN, is not looked at.
    is_empty = (highest == float("-inf")) | (total == 0)
    other_is_empty = (other_highest == float("-inf")) | (other_total == 0)
    part = tl.where(is_empty, 0.0, mean * _quotient(weight, divisor))
    other_part = tl.where(other_is_empty, 0.0, other_mean * _quotient(other_weight, divisor))
    return merged, merged_total, part + other_part


@triton.jit
def absolute(value, world_size):
    """The absolute value: what ``absmax`` of a single contribution is."""
    return tl.abs(value)


@triton.jit
def absmax(first, second):
    """The larger absolute value; NaN propagates."""
    return tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def logaddexp(first, second):
    """``log(exp(first) + exp(second))``, accurate also where the result is near zero."""
    highest = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    # Equal values need no difference, and equal infinities have none.
    ratio = tl.exp(tl.where(first == second, 0.0, -tl.abs(first - second)))
    shifted = 1.0 + ratio
    # log(1 + ratio) with the rounding of 1 + ratio taken back.
    is_lost = shifted == 1.0
    excess = tl.where(is_lost, 1.0, shifted - 1.0)
    return highest + tl.where(is_lost, ratio, tl.log(shifted) * _quotient(ratio, excess))

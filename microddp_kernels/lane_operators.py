"""The shipped operators beside NCCL's five: over several lanes, and a few of one lane.

Every operator here is commutative and associative; those that round are so up to rounding. Its function stands in
``lane_functions``, and the same function runs on every launcher.

``argmax``, ``argmin``
    Lanes (value, index). The pair with the largest (smallest) value; of equal values the one with the lowest index;
    -0.0 equals +0.0. NaN counts as the largest for argmax and as the smallest for argmin, and of several NaN the one
    with the lowest index is taken, as ``torch.argmax`` and ``torch.argmin`` do. Exact: no rounding, and the same bits
    in any order. Indices are global: each rank adds the start of its part.

``welford``
    Lanes (mean, m2, count), m2 the sum of squared deviations from the mean. With delta = mean_b - mean_a::

        count = count_a + count_b      mean = mean_a + delta * count_b / count
        m2 = m2_a + m2_b + delta**2 * count_a * count_b / count

    The update of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
    (1979). A state of count 0 is the identity, whatever its mean and m2 hold (``torch.mean`` of nothing is NaN); empty
    states alone give (0, 0, 0). NaN propagates from states that are not empty; an infinite mean stays infinite
    (opposite infinities give NaN) and its m2 is NaN. Counts are whole numbers, at least 0; a float32 count is exact up
    to 2**24. m2 overflows where the squared difference of two means does. Variance: ``m2 / count`` or
    ``m2 / (count - 1)``.

``logsumexp``
    Lanes (max, sum): the largest x of a set and the sum of exp(x - max) over it; the result is ``max + log(sum)``::

        max = maximum(max_a, max_b)    sum = sum_a * exp(max_a - max) + sum_b * exp(max_b - max)

    The merge of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). A state of max -inf holds
    nothing that counts, and its sum, often NaN, is not looked at; sums of such states only are 0. A max of +inf is
    kept, and sums of equal infinite max are added. Otherwise NaN propagates from either lane into the sum, and from max
    into both.

``softmax_merge``
    Lanes (max, sum, out), out wide: one row of out for each max and sum. Partial attention over disjoint sets of keys:
    a row's largest score, the sum of exp(score - max), and the *normalised* output, sum of exp(score - max) * value
    divided by sum, as flash-attention kernels give it. max and sum merge as in ``logsumexp``, and::

        out = (out_a * sum_a * exp(max_a - max) + out_b * sum_b * exp(max_b - max)) / sum

    so that the result is attention over the union of the keys, ready for use (the merge of split key-value attention:
    Dao et al., "Flash-Decoding for long-context inference", 2023). From a log-sum-exp per row, give (lse, 1, out). A
    row of max -inf or sum 0 has no keys: its out, often NaN, is not looked at; out of rows without any keys is 0.

``absmax``
    ``max(abs(a), abs(b))``, NaN propagates. A single contribution gives its absolute value too (its ``finalize``). The
    most negative integer has no absolute value: it wraps around to itself, below every other.

``logaddexp``
    ``log(exp(a) + exp(b)) = max(a, b) + log1p(exp(-abs(a - b)))``; -inf is the identity, +inf wins, NaN propagates.

``premul_sum(factor)``
    The sum of what each rank multiplies by its factor before it is combined.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any, Final

import torch

from microddp_kernels.dtypes import BOOL, COMPLEX, FLOATS, FLOATS8, INTEGERS, UNSIGNED
from microddp_kernels.op_registry import register_op
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import KernelFunction, Lane, ReduceOp

__all__ = ["premul_sum"]

_MODULE: Final = "microddp_kernels.lane_functions"
_ORDERED: Final = FLOATS | FLOATS8 | INTEGERS | UNSIGNED
_PRECISE: Final = frozenset({torch.float32, torch.float64})
_INDICES: Final = frozenset({torch.int32, torch.int64})

_VALUE_AND_INDEX: Final = (Lane("value", _ORDERED | BOOL), Lane("index", _INDICES))
_MOMENTS: Final = (Lane("mean", _PRECISE), Lane("m2", _PRECISE), Lane("count", _PRECISE | _INDICES))
_MAX_AND_SUM: Final = (Lane("max", FLOATS), Lane("sum", _PRECISE))


def premul_sum(factor: float) -> ReduceOp:
    """The sum of contributions, each multiplied by ``factor`` before it is combined: NCCL's PreMulSum.

    The product is computed in the accumulation type, float32 for 16- and 8-bit floats. As with NCCL, ranks may give
    different factors: these are not part of what ranks must agree on. Defined on floats and complex numbers; NaN and
    infinities behave as in ``sum``.

    Raises:
        TypeError: ``factor`` is no real number.
        ValueError: it is NaN or infinite, or too large for a float.
    """
    given: object = factor  # as callers without a type checker may do
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"the factor of premul_sum must be a real number, got {given!r}")
    try:
        scale = float(given)
    except OverflowError as error:
        raise ValueError("the factor of premul_sum must be finite, got an integer too large for a float") from error
    if not math.isfinite(scale):
        raise ValueError(f"the factor of premul_sum must be finite, got {factor!r}")
    return _premul_sum(scale, math.copysign(1.0, scale))


@lru_cache(maxsize=64)
def _premul_sum(scale: float, sign: float) -> ReduceOp:
    """One operator for a factor, however often it is asked for, so that plans are found again; -0.0 is not 0.0."""
    return replace(get_op("sum"), name="premul_sum", dtypes=FLOATS | FLOATS8 | COMPLEX, scale=scale)


def _op(name: str, lanes: tuple[Lane, ...] = (), dtypes: frozenset[torch.dtype] | None = None, **more: Any) -> ReduceOp:
    first_dtypes = lanes[0].dtypes if dtypes is None else dtypes
    return ReduceOp(name, KernelFunction(_MODULE, name), None, first_dtypes, lanes, **more)


# A NaN claim is about every state. Those of welford, logsumexp and softmax_merge that hold nothing may hold NaN.
for _each in (
    _op("argmax", _VALUE_AND_INDEX, nan="propagate"),
    _op("argmin", _VALUE_AND_INDEX, nan="propagate"),
    _op("welford", _MOMENTS),
    _op("logsumexp", _MAX_AND_SUM),
    _op("softmax_merge", (*_MAX_AND_SUM, Lane("out", FLOATS, wide=True))),
    _op("absmax", dtypes=_ORDERED, finalize=KernelFunction(_MODULE, "absolute"), nan="propagate"),
    _op("logaddexp", dtypes=FLOATS, nan="propagate"),
):
    register_op(_each)

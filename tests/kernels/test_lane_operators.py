"""argmax, argmin, absmax, logaddexp and premul_sum: against torch on the whole, and Python's own formulas."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from microddp_kernels import get_op
from microddp_kernels.dtypes import COMPLEX, FLOATS, FLOATS8, INTEGERS, UNSIGNED
from microddp_kernels.lane_operators import premul_sum
from tests.kernels.lane_tools import INF, NAN, combine, on_each_launcher, one_by_one, require_same, tensors

pytestmark = pytest.mark.timeout(60)

# argmax, argmin


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """A type that torch can index, of the same size."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """In a type that torch can compare, in the same order."""
    if values.dtype == torch.uint64:
        return values.view(torch.int64) ^ torch.iinfo(torch.int64).min
    if values.dtype in UNSIGNED or values.dtype == torch.bool:
        return values.to(torch.int64)
    return values.to(torch.float64) if values.dtype in FLOATS8 else values


def _values(dtype: torch.dtype, shape: tuple[int, int], random: np.random.Generator) -> torch.Tensor:
    """Few different values, so that most rows have ties; NaN, infinities and both zeros among the floats."""
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, shape) > 0)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.tensor([limits.min, limits.max, 1, 2], dtype=dtype)[torch.from_numpy(random.integers(0, 4, shape))]
    choices = [0.0, -0.0, 1.0, -1.0, 2.0, 2.0, NAN] + ([] if dtype == torch.float8_e4m3fn else [INF, -INF])
    return torch.tensor(random.choice(choices, shape)).to(torch.float32).to(dtype)


@on_each_launcher
@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", sorted(get_op("argmax").lanes[0].dtypes, key=str), ids=str)
@pytest.mark.filterwarnings(
    "ignore:operator 'arg:RuntimeWarning"
)  # torch computes on no uint16: a fall back is told once
def test_extreme_of_ranks_is_that_of_the_whole(launcher: str, name: str, dtype: torch.dtype) -> None:
    """Each rank holds two places of each row; their results, put together in any order, are torch's for all places."""
    random = np.random.default_rng(5)
    whole = _values(dtype, (200, 8), random)
    comparable = _comparable(whole)
    index_dtype = torch.int32 if dtype == torch.float8_e5m2 else torch.int64
    elements = whole.view(-1).view(_carrier(dtype))
    states = []
    for rank in range(4):
        places = getattr(torch, name)(comparable[:, 2 * rank : 2 * rank + 2], dim=1) + 2 * rank
        held = elements[torch.arange(len(whole)) * 8 + places].view(dtype)
        states.append((held, places.to(index_dtype)))
    expected = getattr(torch, name)(comparable, dim=1).tolist()
    wanted = elements[torch.arange(len(whole)) * 8 + torch.tensor(expected)].view(dtype)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        found_values, found_indices = combine(launcher, name, [states[rank] for rank in order])
        assert found_indices.tolist() == expected
        assert [repr(each) for each in found_values.tolist()] == [repr(each) for each in wanted.tolist()]
    pairwise = one_by_one(launcher, name, [states[rank] for rank in (2, 0, 3, 1)])
    assert pairwise[1].tolist() == expected


@on_each_launcher
def test_extremes_written_by_hand(launcher: str) -> None:
    types = (torch.float32, torch.int32)
    first = tensors([1, NAN, 2, NAN, -0.0, INF, -INF], [7, 5, 9, 3, 1, 4, 4], dtypes=types)
    second = tensors([2, 9, 2, NAN, 0.0, NAN, INF], [1, 1, 8, 2, 6, 6, 6], dtypes=types)
    for states in ([first, second], [second, first]):
        found = combine(launcher, "argmax", states)
        require_same(found, [[2, NAN, 2, NAN, -0.0, NAN, INF], [1, 5, 8, 2, 1, 6, 6]])
        found = combine(launcher, "argmin", states)
        require_same(found, [[1, NAN, 2, NAN, -0.0, NAN, -INF], [7, 5, 8, 2, 1, 6, 4]])


@on_each_launcher
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_extremes_have_the_same_bits_in_every_order(launcher: str, name: str) -> None:
    """All triples of states, equal ones and those that share an index among them: one result, whatever the order."""
    states = list(itertools.product([0.0, -0.0, 1.0, NAN, -INF], [0, 3]))
    triples = list(itertools.product(states, repeat=3))
    lanes = [
        tensors([t[rank][0] for t in triples], [t[rank][1] for t in triples], dtypes=(torch.float64, torch.int64))
        for rank in range(3)
    ]
    expected = combine(launcher, name, lanes)
    for order in itertools.permutations(range(3)):
        found = combine(launcher, name, [lanes[rank] for rank in order])
        require_same(found, [lane.tolist() for lane in expected])
    a, b, c = lanes
    nested = combine(launcher, name, [a, combine(launcher, name, [b, c])])
    require_same(nested, [lane.tolist() for lane in expected])


# absmax, logaddexp, premul_sum


@on_each_launcher
def test_absmax(launcher: str) -> None:
    first, second = tensors([-3, 2, NAN, -INF, -0.0, 1]), tensors([1, -5, 1, 7, -0.0, NAN])
    for states in ([first, second], [second, first]):
        require_same(combine(launcher, "absmax", states), [[3, 5, NAN, INF, 0.0, NAN]])
    require_same(combine(launcher, "absmax", [first], divisor=1), [[3, 2, NAN, INF, 0.0, 1]])
    small = tensors([-128, -128, -7, 127], dtypes=[torch.int8])
    other = tensors([-128, 0, 3, -128], dtypes=[torch.int8])
    require_same(combine(launcher, "absmax", [small, other]), [[-128, 0, 7, 127]])
    require_same(combine(launcher, "absmax", [small], divisor=1), [[-128, -128, 7, 127]])


@on_each_launcher
@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
def test_logaddexp(launcher: str, dtype: torch.dtype) -> None:
    """Within two units in the last place, at the larger of result and operands; also where the result is near zero."""
    random = np.random.default_rng(2)
    (first,) = tensors([0.0, 0.0, -30.0, 1e4, *random.standard_normal(400) * 5], dtypes=[dtype])
    (second,) = tensors([0.0, -20.0, -30.5, -1e4, *random.standard_normal(400) * 5], dtypes=[dtype])
    (found,) = combine(launcher, "logaddexp", [(first,), (second,)])
    info = torch.finfo(dtype)
    for one, other, got in zip(first.tolist(), second.tolist(), found.tolist()):
        wanted = max(one, other) + math.log1p(math.exp(-abs(one - other)))
        # If the larger operand is zero, the logarithm is all there is.
        size = abs(wanted) if max(one, other) == 0 else max(abs(one), abs(other), abs(wanted))
        assert abs(got - wanted) <= 2 * info.eps * max(size, info.smallest_normal), (one, other)


@on_each_launcher
def test_logaddexp_of_infinities(launcher: str) -> None:
    first = tensors([INF, INF, -INF, -INF, INF, NAN, NAN, -0.0])
    second = tensors([INF, -INF, -INF, 3, 1, -INF, INF, -INF])
    expected = [[INF, INF, -INF, 3, INF, NAN, NAN, 0.0]]
    for states in ([first, second], [second, first]):
        require_same(combine(launcher, "logaddexp", states), expected)


@on_each_launcher
def test_premul_sum(launcher: str) -> None:
    """Scaled in the accumulation type and rounded once, then summed."""
    op = premul_sum(0.1)
    values = [3.0, -1.0, NAN, INF, 65504.0]
    (scaled,) = combine(launcher, op, [tensors(values, dtypes=[torch.float16])], scale=op.scale)
    expected = [np.float16(np.float32(value) * np.float32(0.1)) for value in values]
    require_same((scaled,), [[float(each) for each in expected]])
    (summed,) = combine(launcher, op, [(scaled,), (scaled,)])
    require_same((summed,), [[float(np.float16(np.float32(each) + np.float32(each))) for each in expected]])


def test_premul_sum_takes_real_finite_factors() -> None:
    factors: list[Any] = [2, -0.5, np.float32(0.5), Fraction(1, 4)]
    assert [premul_sum(factor).scale for factor in factors] == [2.0, -0.5, 0.5, 0.25]
    for wrong in (True, "2", None, 1j, torch.tensor(2.0)):
        with pytest.raises(TypeError, match="the factor of premul_sum must be a real number, got"):
            premul_sum(wrong)  # type: ignore[arg-type]
    for infinite in (INF, -INF, NAN, 10**400):
        with pytest.raises(ValueError, match="the factor of premul_sum must be finite, got"):
            premul_sum(infinite)


def test_premul_sum_is_the_same_operator_for_every_factor() -> None:
    """Ranks may differ in it, as with NCCL, so nothing that ranks compare tells factors apart."""
    one, other = premul_sum(2), premul_sum(3)
    assert (one.name, one.fingerprint) == (other.name, other.fingerprint) == ("premul_sum", "")
    assert one.dtypes == FLOATS | FLOATS8 | COMPLEX and one.commutative and one.associative


# What is declared


def test_types_of_lanes() -> None:
    precise, indices = {torch.float32, torch.float64}, {torch.int32, torch.int64}
    expected = {
        "argmax": (FLOATS | FLOATS8 | INTEGERS | UNSIGNED | {torch.bool}, indices),
        "argmin": (FLOATS | FLOATS8 | INTEGERS | UNSIGNED | {torch.bool}, indices),
        "logsumexp": (FLOATS, precise),
        "softmax_merge": (FLOATS, precise, FLOATS),
        "welford": (precise, precise, precise | indices),
    }
    for name, dtypes in expected.items():
        op = get_op(name)
        assert tuple(lane.dtypes for lane in op.lanes) == dtypes and op.dtypes == dtypes[0]
        assert [lane.name for lane in op.lanes if lane.wide] == (["out"] if name == "softmax_merge" else [])
    with pytest.raises(TypeError, match="lane 'index' of operator 'argmax' is not defined on float32"):
        combine("eager", "argmax", [tensors([1.0], [2.0])])
    with pytest.raises(TypeError, match="operator 'logaddexp' is not defined on int64"):
        combine("eager", "logaddexp", [tensors([1], dtypes=[torch.int64])] * 2)

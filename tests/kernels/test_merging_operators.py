"""welford, logsumexp and softmax_merge: parts put together against torch on the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import microddp_kernels.lane_operators  # noqa: F401  (registers the operators)
from tests.kernels.lane_tools import INF, NAN, State, combine, on_each_launcher, one_by_one, require_same, tensors

pytestmark = pytest.mark.timeout(60)

# welford


def _moments(values: torch.Tensor, dtypes: Sequence[torch.dtype]) -> State:
    """(mean, m2, count) over the columns of each row, in float64, then rounded."""
    wide, count = values.to(torch.float64), values.shape[1]
    mean = wide.mean(dim=1)  # NaN for none
    m2 = ((wide - mean[:, None]) ** 2).sum(dim=1) if count else torch.full_like(mean, NAN)
    counts = torch.full((len(values),), count)
    return mean.to(dtypes[0]), m2.to(dtypes[1]), counts.to(dtypes[2])


@on_each_launcher
@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("count_dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_welford_is_var_mean_of_the_whole(
    launcher: str, num_ranks: int, count_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Uneven counts, zero among them, of the same distribution and of shifted ones."""
    random = np.random.default_rng(num_ranks)
    counts = random.permutation([0, *random.integers(1, 40, num_ranks - 1)])
    shifts = random.standard_normal((num_ranks, 1, 1)) * 3
    parts = [torch.from_numpy(random.standard_normal((64, count)) + shift) for count, shift in zip(counts, shifts)]
    whole = torch.cat([part.to(dtype) for part in parts], dim=1).to(torch.float64)
    states = [_moments(part.to(dtype), (dtype, dtype, count_dtype)) for part in parts]
    for order in (states, states[::-1]):
        mean, m2, count = one_by_one(launcher, "welford", order)
        assert count.tolist() == [sum(counts)] * 64
        variance, expected = torch.var_mean(whole, dim=1)
        scale = whole.abs().mean(dim=1)
        assert float(((mean.double() - expected).abs() / scale).max()) < 1e-6
        torch.testing.assert_close(m2.double() / (count.double() - 1), variance, rtol=1e-6, atol=0)
    folded = combine(launcher, "welford", states)
    torch.testing.assert_close(folded[1], m2, rtol=1e-5, atol=0)


@on_each_launcher
def test_welford_far_from_zero(launcher: str) -> None:
    """The variance of values near 10 000, which the sum of squares in float32 would lose."""
    random = np.random.default_rng(0)
    parts = [torch.from_numpy(random.standard_normal((64, count)) + 1e4).float() for count in (30, 1, 700)]
    states = [_moments(part, (torch.float32,) * 3) for part in parts]
    _, m2, _ = combine(launcher, "welford", states)
    whole = torch.cat(parts, dim=1).double()
    torch.testing.assert_close(m2.double() / 731, whole.var(dim=1, correction=0), rtol=1e-4, atol=0)


@on_each_launcher
def test_welford_by_hand(launcher: str) -> None:
    first = tensors(
        [1, NAN, 3, NAN, INF, INF, INF, 5, NAN], [0, NAN, 2, 7, NAN, NAN, NAN, 1, 1], [1, 0, 2, 0, 2, 1, 3, 2, 2]
    )
    second = tensors([2, 4, NAN, 8, 1, -INF, INF, 5, 1], [0, 2, NAN, 7, 0, NAN, NAN, 2, 1], [1, 3, 0, 0, 3, 1, 1, 2, 0])
    expected: list[list[float]] = [
        [1.5, 4, 3, 0, INF, NAN, INF, 5, NAN],
        [0.5, 2, 2, 0, NAN, NAN, NAN, 3, 1],
        [2, 3, 2, 0, 5, 2, 4, 4, 2],
    ]
    for states in ([first, second], [second, first]):
        require_same(combine(launcher, "welford", states), expected)


# logsumexp, softmax_merge


def _exponentials(scores: torch.Tensor) -> State:
    """(max, sum of exp(x - max)) of each row, as a user would write it: NaN where all is -inf."""
    highest = scores.max(dim=1).values
    return highest, (scores - highest[:, None]).exp().sum(dim=1)


def _scores(random: np.random.Generator, rows: int, count: int) -> torch.Tensor:
    scores = torch.from_numpy(random.standard_normal((rows, count)) * 10)
    scores[torch.from_numpy(random.random((rows, count)) < 0.3)] = -INF
    scores[: rows // 4, :] = -INF
    return scores


@on_each_launcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logsumexp_is_that_of_the_whole(launcher: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(1)
    parts = [_scores(random, 40, count).to(dtype) for count in (1, 5, 2)]
    parts[2][:10] = torch.from_numpy(random.standard_normal((10, 2)))  # rows that one rank alone has something in
    parts[2][:5] = -INF  # and rows that nobody has
    highest, total = combine(launcher, "logsumexp", [_exponentials(part) for part in parts])
    expected = torch.logsumexp(torch.cat(parts, dim=1).double(), dim=1)
    assert highest.tolist() == torch.cat(parts, dim=1).max(dim=1).values.tolist()
    torch.testing.assert_close(highest.double() + total.double().log(), expected, rtol=1e-6, atol=1e-6)
    assert expected[:5].tolist() == [-INF] * 5 and total[:5].tolist() == [0.0] * 5


@on_each_launcher
def test_logsumexp_by_hand(launcher: str) -> None:
    first = tensors([0, -INF, -INF, -INF, INF, INF, NAN, 2, 0, 3], [1, 0, NAN, 5, 1, 2, 1, NAN, 1, 2])
    second = tensors([0, 1, 1, -INF, 5, INF, 0, 2, -200, -INF], [2, 3, 3, NAN, 1, 3, 1, 1, 4, NAN])
    expected = [[0, 1, 1, -INF, INF, INF, NAN, 2, 0, 3], [3, 3, 3, 0, 1, 5, NAN, NAN, 1, 2]]
    for states in ([first, second], [second, first]):
        require_same(combine(launcher, "logsumexp", states), expected)


def _attention(scores: torch.Tensor, values: torch.Tensor) -> State:
    """Partial attention of each row: largest score, sum of exponentials, normalised output; NaN for no keys."""
    highest, total = _exponentials(scores)
    out = (scores - highest[:, None]).exp() @ values / total[:, None]
    return highest, total, out.reshape(-1)


@on_each_launcher
@pytest.mark.parametrize("width", [1, 5, 64])
def test_softmax_merge_is_attention_over_all_keys(launcher: str, width: int) -> None:
    random = np.random.default_rng(width)
    counts = (3, 1, 7, 2)
    scores = [_scores(random, 24, count).float() for count in counts]
    scores[1][:6] = torch.from_numpy(random.standard_normal((6, 1))).float()
    scores[1][:3] = -INF  # rows without any key
    values = [torch.from_numpy(random.standard_normal((count, width))).float() for count in counts]
    states = [_attention(each, value) for each, value in zip(scores, values)]
    weights = torch.softmax(torch.cat(scores, dim=1).double(), dim=1)
    expected = weights @ torch.cat(values).double()
    expected[:3] = 0.0
    for order in (states, states[::-1]):
        highest, total, out = combine(launcher, "softmax_merge", order)
        torch.testing.assert_close(out.view(24, width).double(), expected, rtol=1e-5, atol=1e-5)
        assert not out.isnan().any() and total[:3].tolist() == [0.0] * 3
        assert highest.tolist() == torch.cat(scores, dim=1).max(dim=1).values.tolist()
    by_lse = [(top + torch.where(top.isinf(), 0.0, total.log()), torch.ones(24), out) for top, total, out in states]
    out = combine(launcher, "softmax_merge", by_lse)[2]
    torch.testing.assert_close(out.view(24, width).double(), expected, rtol=1e-5, atol=1e-5)


@on_each_launcher
def test_softmax_merge_by_hand(launcher: str) -> None:
    """A NaN among the values of a key counts even if its weight is lost; one where there is no key does not."""
    first = tensors([0, -INF, 5, 0, NAN], [1, NAN, 0, 1, 1], [1, 2, NAN, NAN, NAN, 7, NAN, 1, 3, 3])
    second = tensors([0, 3, 1, 200, 0], [3, 2, 2, 1, 1], [5, 6, 1, 2, 3, 4, 5, 6, 4, 4])
    expected = [[0, 3, 5, 200, NAN], [4, 2, 2 * math.exp(-4), 1, NAN], [4, 5, 1, 2, 3, 4, NAN, 6, NAN, NAN]]
    for states in ([first, second], [second, first]):
        found = combine(launcher, "softmax_merge", states)
        for lane, wanted in zip(found, expected):
            torch.testing.assert_close(lane, torch.tensor(wanted).float(), rtol=1e-6, atol=0, equal_nan=True)

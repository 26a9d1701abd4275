"""Operators made of ``user_functions``, and samples of the states on which shipped operators are defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from microddp.testing.samples import Sampler
from microddp_kernels import Lane, ReduceOp
from microddp_kernels.dtypes import BOOL, FLOATS, FLOATS8, INTEGERS
from microddp_kernels.reduce_op import Values

F32 = frozenset({torch.float32})
REALS = FLOATS | FLOATS8 | INTEGERS | BOOL
VALUE_AND_INDEX = (Lane("value", F32), Lane("index", frozenset({torch.int64})))
TWO_FLOATS = (Lane("left", F32), Lane("right", F32))
MOMENTS = tuple(Lane(name, F32) for name in ("mean", "m2", "count"))
ENTRIES = tuple(Lane(name, F32) for name in ("a", "b", "c", "d"))
WEIGHT_AND_ROWS = (Lane("weight", F32), Lane("rows", F32, wide=True))


def make_op(combine: Any, dtypes: frozenset[torch.dtype] = F32, **declared: Any) -> ReduceOp:
    return ReduceOp(combine.fn.__name__, combine, declared.pop("eager", None), dtypes, **declared)


def floats(values: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def sample_moments(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> Values:
    """(mean, m2, count) of samples of 0 to 5 elements; those of no element hold anything."""
    counts = random.integers(0, 6, numel)
    means = random.standard_normal(numel) * 10.0 ** random.integers(-2, 3, numel)
    means[random.random(numel) < 0.2] = 1.5
    means[random.random(numel) < 0.05] = np.nan
    means[random.random(numel) < 0.05] = np.inf
    deviations = np.where(counts > 1, random.random(numel) * counts, 0.0)
    deviations[~np.isfinite(means)] = np.nan
    means[(counts == 0) & (random.random(numel) < 0.5)] = np.nan
    deviations[(counts == 0) & (random.random(numel) < 0.5)] = np.nan
    return floats(means, dtypes[0]), floats(deviations, dtypes[1]), floats(counts, dtypes[2])


def sample_moments_in_use(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> Values:
    """Finite moments, of one element at least."""
    counts = random.integers(1, 6, numel)
    means, deviations = random.standard_normal(numel), random.random(numel) * (counts > 1)
    return floats(means, dtypes[0]), floats(deviations, dtypes[1]), floats(counts, dtypes[2])


def _exponentials(random: np.random.Generator, numel: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    highest = random.integers(-8, 9, numel) * random.choice([0.25, 4.0], numel)
    totals = 1.0 + random.random(numel) * random.integers(0, 9, numel)
    is_empty = random.random(numel) < 0.2
    highest[is_empty] = -np.inf
    totals[is_empty] = random.choice([0.0, 2.0, np.nan], int(is_empty.sum()))
    highest[random.random(numel) < 0.05] = np.inf
    highest[random.random(numel) < 0.05] = np.nan
    return highest, totals


def sample_exponentials(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> Values:
    """(max, sum), also of nothing, with infinities and NaN."""
    highest, totals = _exponentials(random, numel)
    return floats(highest, dtypes[0]), floats(totals, dtypes[1])


def sample_attention(random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]) -> Values:
    """(max, sum, out) with five elements of out a row, NaN where there are no keys."""
    highest, totals = _exponentials(random, numel)
    outs = random.standard_normal((numel, 5))
    outs[np.isneginf(highest) & (random.random(numel) < 0.7)] = np.nan
    return floats(highest, dtypes[0]), floats(totals, dtypes[1]), floats(outs.reshape(-1), dtypes[2])


SAMPLES: dict[str, Sampler] = {
    "logsumexp": sample_exponentials,
    "softmax_merge": sample_attention,
    "welford": sample_moments,
}

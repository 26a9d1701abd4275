"""Operands to test with: every combination of special states, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from microddp.testing.states import Lanes, as_values, bytes_of, convert, joined, take
from microddp_kernels.dtypes import dtype_names
from microddp_kernels.launchers.checks import widths_of
from microddp_kernels.reduce_op import ReduceOp, Values

__all__ = ["NUM_OPERANDS", "Sampler", "default_values", "draw_operands"]

Sampler = Callable[[np.random.Generator, int, tuple[torch.dtype, ...]], Values]
"""``samples(random, numel, dtypes)``: that many valid states, in 1-D tensors of these types, one a lane."""

NUM_OPERANDS: Final = 4
_POOL: Final = 16
"""Every combination of three of so many states is tried."""

_POOL_OF_ROWS: Final = 8
"""The same for operators with a wide lane, which take longer."""

_WIDTH: Final = 3
"""Elements a row of a wide lane."""


def draw_operands(
    op: ReduceOp, samples: Sampler | None, seed: int, numel: int, dtypes: tuple[torch.dtype, ...]
) -> tuple[Lanes, ...]:
    """Operands of equal numbers of states: all triples out of a pool, and ``numel`` random ones, some of them equal.

    Raises:
        TypeError, ValueError: what ``samples`` returned is not what the operator takes.
    """
    random = np.random.default_rng(seed)
    size = _POOL_OF_ROWS if any(lane.wide for lane in op.lanes) else _POOL
    pool = _states(op, samples, random, size, dtypes)
    first, second, third = (axis.reshape(-1) for axis in np.indices((size,) * 3))
    fourth = (first + 2 * second + 3 * third) % size
    others = [_states(op, samples, random, numel, dtypes) for _ in range(NUM_OPERANDS)]
    parts = []
    for rows, lanes in zip((first, second, third, fourth), others):
        # Ties: in every fourth random row the operand is the first one's, or one of the pool.
        mixed = joined([lanes, others[0], pool])
        own = np.arange(numel)
        choice = random.integers(0, 8, numel)
        chosen = np.where(choice == 0, own + numel, np.where(choice == 1, 2 * numel + own % size, own))
        parts.append(joined([take(op, pool, rows), take(op, mixed, chosen)]))
    return tuple(parts)


def _states(
    op: ReduceOp, samples: Sampler | None, random: np.random.Generator, numel: int, dtypes: tuple[torch.dtype, ...]
) -> Lanes:
    if samples is not None:
        return _checked(op, samples(random, numel, dtypes), numel, dtypes)
    if not op.lanes:
        return (default_values(random, numel, dtypes[0]),)
    counts = [numel * (_WIDTH if lane.wide else 1) for lane in op.lanes]
    lanes = [_mixed_values(random, count, dtype) for dtype, count in zip(dtypes, counts)]
    for lane in range(1, len(lanes)):  # lanes that equal each other in one state
        if dtypes[lane] == dtypes[lane - 1] and counts[lane] == counts[lane - 1]:
            at = torch.from_numpy(np.flatnonzero(random.integers(0, 6, counts[lane]) == 0))
            bytes_of(lanes[lane])[at] = bytes_of(lanes[lane - 1])[at]
    return tuple(lanes)


def _checked(op: ReduceOp, values: Values, numel: int, dtypes: tuple[torch.dtype, ...]) -> Lanes:
    lanes = values if isinstance(values, tuple) else (values,)
    if len(lanes) != len(dtypes) or not all(isinstance(tensor, torch.Tensor) for tensor in lanes):
        expected = f"a tuple of {len(dtypes)} tensors" if op.lanes else "a tensor"
        raise TypeError(f"samples must return {expected} for operator {op.name!r}, got {type(values).__name__}")
    found = tuple(tensor.dtype for tensor in lanes)
    if found != dtypes:
        asked = ", ".join(dtype_names([dtype]) for dtype in dtypes)
        raise TypeError(f"samples was asked for {asked}, got {', '.join(dtype_names([dtype]) for dtype in found)}")
    if any(tensor.dim() != 1 for tensor in lanes):
        raise ValueError(f"samples must return 1-D tensors, got shapes {[tuple(tensor.shape) for tensor in lanes]}")
    widths = widths_of(op, as_values(op, lanes))
    sizes = [tensor.numel() for tensor in lanes]
    if sizes != [numel * width for width in widths]:
        raise ValueError(f"samples was asked for {numel} states, got lanes of {sizes} elements")
    return tuple(tensor.detach().contiguous() for tensor in lanes)


def default_values(random: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of a type with none left out: its special values if there is room for no more, else a random mixture."""
    mixed = _mixed_values(random, numel, dtype)
    if numel > _POOL:
        return mixed
    specials = _specials(dtype)[:numel]
    return torch.cat([specials, mixed[specials.numel() :]])


def _mixed_values(random: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Special, small, moderate and any values, a quarter each."""
    specials = bytes_of(_specials(dtype))
    kinds = random.integers(0, 4, numel)
    parts = [
        specials[torch.from_numpy(random.integers(0, len(specials), numel))],
        *(bytes_of(make(random, numel, dtype)) for make in (_small, _moderate, _any)),
    ]
    chosen = torch.stack(parts)[torch.from_numpy(kinds), torch.arange(numel)]
    return chosen.reshape(-1).view(dtype)


def _specials(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_complex:
        parts = _special_floats(dtype.to_real())
        return torch.complex(parts, parts.flip(0).roll(3))
    if dtype.is_floating_point:
        return _special_floats(dtype)
    limits = torch.iinfo(dtype)
    signed = [-1, limits.min, limits.min + 1, -7] if limits.min else [limits.max // 2, limits.max // 2 + 1]
    return torch.tensor([0, 1, limits.max, 2, *signed, 3, limits.max - 1, 100], dtype=dtype)


def _special_floats(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    wide = torch.tensor(
        [
            *(0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -1.5, info.max, info.min),
            *(info.smallest_normal, 0.75 * info.smallest_normal, least, -3 * least),
            *(float("inf"), float("-inf"), float("nan")),
        ],
        dtype=torch.float64,
    )
    (narrow,) = convert((wide,), (dtype,))
    return narrow


def _small(random: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Few different values, so that ties are common, and sums and products exact."""
    if dtype.is_complex:
        real, imaginary = (_small(random, numel, dtype.to_real()) for _ in range(2))
        return torch.complex(real, imaginary)
    signed = dtype == torch.bool or dtype.is_floating_point or torch.iinfo(dtype).min < 0
    whole = torch.from_numpy(random.integers(-4 if signed else 0, 5, numel))
    if dtype == torch.bool:
        return whole > 0
    return (whole.to(torch.float64) / 2).to(dtype) if dtype.is_floating_point else whole.to(dtype)


def _any(random: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits: every class of value, of every size. Signalling NaN, which no arithmetic gives, are made quiet."""
    high = 2 if dtype == torch.bool else 256
    bits = torch.from_numpy(random.integers(0, high, numel * dtype.itemsize, dtype=np.uint8)).view(dtype)
    parts = torch.view_as_real(bits) if dtype.is_complex else bits
    if parts.dtype.is_floating_point and parts.dtype.itemsize > 1:
        parts[parts.isnan()] = float("nan")
    return bits


def _moderate(random: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal floats, half of them of other sizes; integers of every number of bits."""
    if dtype.is_complex:
        real, imaginary = (_moderate(random, numel, dtype.to_real()) for _ in range(2))
        return torch.complex(real, imaginary)
    if dtype == torch.bool:
        return _small(random, numel, dtype)
    if not dtype.is_floating_point:
        bits = torch.iinfo(dtype).bits - 1
        sizes = torch.from_numpy(np.exp2(random.uniform(0, bits, numel)).astype(np.uint64).view(np.int64))
        is_negative = torch.from_numpy(random.integers(0, 2, numel) > 0) & (torch.iinfo(dtype).min < 0)
        return torch.where(is_negative, -sizes, sizes).to(dtype)
    scales = np.where(random.integers(0, 2, numel) == 0, np.exp2(random.uniform(-5, 10, numel)), 1.0)
    return torch.from_numpy(random.standard_normal(numel) * scales).to(dtype)

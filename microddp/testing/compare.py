"""Which rows of two results differ, beyond a tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from microddp.testing.states import WITHOUT_INFINITY, Array, Lanes, column, is_float

__all__ = ["differs", "half_ulp", "limited", "magnitude", "perturbed", "ulp"]

_SEEDS: Final = 1024


def magnitude(columns: Iterable[Array]) -> Array:
    """The largest finite absolute value at each place."""
    found: Array | None = None
    for values in columns:
        size = np.where(np.isfinite(values), np.abs(values), 0.0)
        found = size if found is None else np.maximum(found, size)
    if found is None:
        raise ValueError("the magnitude of no columns")
    return found


def ulp(values: Array, dtype: torch.dtype) -> Array:
    """The distance of the floats of ``dtype`` (the parts, if it is complex) around finite ``values``."""
    info = torch.finfo(dtype)
    _, exponent = np.frexp(np.abs(values))
    return info.eps * np.maximum(np.ldexp(0.5, exponent), info.smallest_normal)


def half_ulp(values: Array, dtype: torch.dtype) -> Array:
    """How far rounding to ``dtype`` moves a value at most."""
    return ulp(values, dtype) / 2


def differs(left: Lanes, right: Lanes, count: int, tolerances: Sequence[Array | None], zero_signs: bool) -> Array:
    """For each of ``count`` rows, whether any lane differs by more than its tolerance (None: at all).

    NaN equals NaN, whatever its payload; an infinity equals itself, and within a tolerance what nearly overflows;
    with ``zero_signs`` -0.0 is not 0.0.
    """
    rows = np.zeros(count, dtype=bool)
    for first, second, tolerance in zip(left, right, tolerances):
        one, two = column(first, count), column(second, count)
        same = one == two
        if is_float(first.dtype):
            if zero_signs:
                same &= (one != 0) | (np.signbit(one) == np.signbit(two))
            same |= np.isnan(one) & np.isnan(two)
            if tolerance is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    near, other = limited(one, two, first.dtype)
                    same |= (np.abs(near - other) <= tolerance) & ((one != 0) | (two != 0))
        rows |= ~same.all(axis=1)
    return rows


def limited(stored: Array, exact: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """What is too large for ``dtype``, in both, as the number that would come after its largest.

    So an overflow compares with what nearly overflows as any two numbers do.
    """
    info = torch.finfo(dtype)
    limit = info.max + float(ulp(np.array([info.max]), dtype)[0])
    if dtype in WITHOUT_INFINITY:
        overflows = np.isnan(stored) & (np.abs(exact) >= info.max)
        stored = np.where(overflows, np.sign(exact) * limit, stored)
    return np.clip(stored, -limit, limit), np.clip(exact, -limit, limit)


def perturbed(lanes: Lanes, size: float, seed: int) -> Lanes:
    """Float and complex lanes with relative errors of up to ``size``.

    The error is a function of the value, so that equal values of a lane stay equal, and comparisons of them come out as
    before. It is another one in each lane: what one lane cancels of another is not exact.
    """
    return tuple(
        _perturbed_one(tensor, size, seed + _SEEDS * lane) if is_float(tensor.dtype) else tensor
        for lane, tensor in enumerate(lanes)
    )


def _perturbed_one(tensor: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    parts = torch.view_as_real(tensor).reshape(-1) if tensor.dtype.is_complex else tensor
    values = parts.double().numpy()
    hashed = np.abs(values).view(np.uint64) ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        hashed = (hashed ^ (hashed >> np.uint64(31))) * np.uint64(factor)
    errors = (hashed >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        moved = torch.from_numpy(values * (1.0 + size * errors)).to(parts.dtype)
    return torch.view_as_complex(moved.view(-1, 2)) if tensor.dtype.is_complex else moved

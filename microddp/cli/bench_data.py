"""What the benchmark reduces, and what must come out, bit by bit, computed by NumPy from the patterns themselves.

The numbers are so small that every partial result is exact in every element type, whatever the order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from microddp.cli.expected import fold

__all__ = ["contribution", "expected", "num_wrong"]

_PERIOD = 1009  # a prime: no chunk, slice or block starts twice at the same place of the pattern
_SEED = 20_240_229


def contribution(rank: int, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """What ``rank`` brings: 1-D, ``numel`` elements, another pattern on each rank."""
    return _repeated(_pattern(rank, dtype, op), numel, dtype)


def expected(world_size: int, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """What every rank must end with."""
    rows = [_pattern(rank, dtype, op) for rank in range(world_size)]
    return _repeated(fold(op, rows, dtype), numel, dtype)


def num_wrong(result: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements are not exactly what they must be."""
    return int(torch.ne(result, want).sum())


def _pattern(rank: int, dtype: torch.dtype, op: str) -> Any:
    """One period, as float64, int64 or bool."""
    generator = np.random.default_rng([_SEED, rank])
    if op == "prod":  # few twos, so that products of many ranks stay small
        values = np.where((np.arange(_PERIOD) + rank) % 8 == 0, 2, 1)
    elif op in ("band", "bor", "bxor"):
        values = generator.integers(0, 128, _PERIOD)
    else:
        values = generator.integers(0, 3, _PERIOD)
    if dtype == torch.bool:
        return generator.integers(0, 2, _PERIOD).astype(bool)
    return values.astype(np.float64 if dtype.is_floating_point else np.int64)


def _repeated(period: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
    one = torch.from_numpy(period).to(dtype)
    return one.repeat(-(-numel // _PERIOD))[:numel].clone()

"""What the ranks contribute to a cell of the matrix: values chosen so that every check can fail, and none must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.matrix import FLOATS8, Cell
from tests.matrix_folds import Array

__all__ = ["draw_values"]

_SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0]
_TOP8 = 24.0
"""Nine of them, rounded to float8 eight times, are below 448, the largest float8_e4m3fn."""


def draw_values(cell: Cell, numel: int, is_special: bool, seed: Sequence[int]) -> torch.Tensor:
    """``numel`` values of the cell's dtype. Special: floats have NaN, infinities, zeros and what overflows among them;
    integers are extremes only."""
    random, dtype = np.random.default_rng(seed), cell.dtype
    if dtype == torch.bool:
        odds = {"bxor": 0.5, **dict.fromkeys(("prod", "min", "band"), 0.9)}.get(cell.op, 0.1)
        return torch.from_numpy(random.random(numel) < odds)
    if dtype.is_complex:
        numbers = np.ascontiguousarray(_complex(random, cell, numel, is_special))
        return torch.empty(numel, dtype=dtype).copy_(torch.from_numpy(numbers))
    if dtype.is_floating_point:
        # NumPy gives an array of one element any stride, and a stride of 0 has no bytes to look at.
        return torch.empty(numel, dtype=dtype).copy_(torch.from_numpy(_floats(random, cell, numel, is_special)))
    return _integers(random, cell, numel, is_special)


def _floats(random: np.random.Generator, cell: Cell, numel: int, is_special: bool) -> Array:
    """Over many magnitudes, but so that no partial result leaves the range of any float type."""
    is_8bit = bool({cell.dtype, cell.travels} & {*FLOATS8})
    if cell.op == "prod":
        reach = 0.5 if is_8bit else 1
        values = random.choice([-1.0, 1.0], numel) * 2.0 ** random.uniform(-reach, reach, numel)
    else:
        reach = 3 if is_8bit else 6
        values = random.standard_normal(numel) * 2.0 ** random.uniform(-reach, reach, numel)
        values = values.clip(-_TOP8, _TOP8) if is_8bit else values
    return _with_specials(random, cell, values) if is_special else values


def _complex(random: np.random.Generator, cell: Cell, numel: int, is_special: bool) -> Array:
    parts = np.empty((numel, 2))
    for number in range(2):
        parts[:, number] = _floats(random, cell, numel, is_special)
    return parts.view(np.complex128).reshape(-1)


def _with_specials(random: np.random.Generator, cell: Cell, values: Array) -> Array:
    choices = list(_SPECIAL)
    if cell.wire is not None or cell.dtype in FLOATS8:  # around the largest that travels, and what overflows
        info = torch.finfo(cell.travels)
        top, gap = info.max, info.max * info.eps / (2 - info.eps)  # between it and the next, if there were one
        choices += [top, -top, top + gap / 4, -top - gap / 2, top / 2, top * 1.9]
    special = random.random(len(values)) < 0.15
    values[special] = random.choice(np.array(choices), int(special.sum()))
    values[:1] = -0.0
    return values


def _integers(random: np.random.Generator, cell: Cell, numel: int, is_special: bool) -> torch.Tensor:
    """Any bits, so that sums and products wrap around; biased where many ranks would leave all zeros or all ones."""
    kind: Any = np.dtype(str(cell.dtype).removeprefix("torch."))
    info = np.iinfo(kind)
    if is_special:
        extremes = np.array([info.min, info.max, 0, 1, info.max - 1], dtype=kind)
        return torch.from_numpy(extremes[random.integers(0, 5, numel)])
    several = 3 if cell.op in ("band", "bor") else 1
    bits = random.integers(0, 256, (several, numel * kind.itemsize), dtype=np.uint8)
    folded = np.bitwise_or.reduce(bits) if cell.op == "band" else np.bitwise_and.reduce(bits)
    values: Array = folded.view(kind)
    return torch.from_numpy(values | kind.type(1) if cell.op == "prod" else values)

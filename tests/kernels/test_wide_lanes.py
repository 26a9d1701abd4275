"""Lanes that are a whole factor wider than others, on the launchers that run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from microddp_kernels import CombineSpec, Lane, ReduceOp
from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from tests.kernels.lanes_tools import ANY_FLOAT, ANY_INTEGER, Lanes, on_each_launcher, run
from tests.kernels.oracle import (
    values_of,
)

pytestmark = pytest.mark.timeout(60)


@triton.jit
def keep_row(first: Any, second: Any) -> Any:
    """The row of the larger key, the first of equal ones; the weights add up; the second wide lane is summed."""
    key, weight, row, sums = first
    other_key, other_weight, other_row, other_sums = second
    takes = key >= other_key
    return tl.where(takes, key, other_key), weight + other_weight, tl.where(takes, row, other_row), sums + other_sums


@triton.jit
def finish_row(values: Any, world_size: Any) -> Any:
    key, weight, row, sums = values
    return key + 1, weight, row * weight, sums + world_size


def rows_op(row: frozenset[torch.dtype] = ANY_FLOAT) -> ReduceOp:
    return ReduceOp(
        "keep_row",
        keep_row,
        None,
        ANY_INTEGER,
        lanes=(
            Lane("key", ANY_INTEGER),
            Lane("weight", ANY_FLOAT),
            Lane("row", row, wide=True),
            Lane("sums", ANY_INTEGER, wide=True),
        ),
        finalize=finish_row,
    )


def row_operands(num_rows: int, widths: tuple[int, int], count: int, dtype: torch.dtype) -> list[Lanes]:
    random = np.random.default_rng(num_rows)
    return [
        (
            torch.tensor(random.integers(0, 3, num_rows).tolist(), dtype=torch.int32),
            torch.tensor(random.integers(0, 9, num_rows).tolist(), dtype=torch.float32),
            torch.tensor(random.integers(-8, 9, num_rows * widths[0]).tolist(), dtype=dtype),
            torch.tensor(random.integers(-99, 99, num_rows * widths[1]).tolist(), dtype=torch.int64),
        )
        for _ in range(count)
    ]


def rows_of(operands: Sequence[Lanes], num_rows: int, divisor: int | None) -> list[list[float]]:
    """The exact results, row by row in Python."""
    keys, weights, rows, sums = ([lane.double().tolist() for lane in lanes] for lanes in zip(*operands, strict=True))
    out: list[list[float]] = [[], [], [], []]
    for row in range(num_rows):
        taken = max(range(len(operands)), key=lambda index: keys[index][row])
        weight = sum(each[row] for each in weights)
        kept, added = (
            [each[row * len(each) // num_rows : (row + 1) * len(each) // num_rows] for each in lane]
            for lane in (rows, sums)
        )
        finishes = divisor is not None
        out[0].append(keys[taken][row] + finishes)
        out[1].append(weight)
        out[2] += [each * weight if finishes else each for each in kept[taken]]
        out[3] += [sum(column) + (divisor or 0) for column in zip(*added, strict=True)]
    return out


@pytest.mark.parametrize("launcher", [EagerLauncher(), InterpreterLauncher(block=8)], ids=lambda each: each.name)
@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("widths", [(1, 1), (3, 3), (4, 4), (8, 8), (9, 9), (20, 20), (5, 2), (2, 12)])
def test_wide_lanes(launcher: Launcher, num_rows: int, widths: tuple[int, int]) -> None:
    """Rows narrower and wider than the 8 elements of a program, of one width and of two, over operands' memory too."""
    for count, divisor, dtype in ((1, None, torch.float32), (2, None, torch.bfloat16), (3, 5, torch.float32)):
        operands = row_operands(num_rows, widths, count, dtype)
        expected = rows_of(operands, num_rows, divisor)
        for alias in (None, count - 1, tuple(lane % count for lane in range(4))):
            found = run(launcher, rows_op(), operands, divisor, alias)
            for bits, lane, wanted in zip(found, operands[0], expected, strict=True):
                assert values_of(torch.from_numpy(bits.view(np.uint8)).view(lane.dtype)).tolist() == wanted


@on_each_launcher
def test_wide_lanes_of_nothing(launcher: Launcher) -> None:
    """No rows; and rows of no columns, beside which the other lanes are still combined."""
    empty = row_operands(0, (4, 4), 2, torch.float32)
    run(launcher, rows_op(), empty)
    operands = row_operands(5, (0, 3), 2, torch.float32)
    found = run(launcher, rows_op(), operands)
    assert found[1].view(np.float32).tolist() == (operands[0][1] + operands[1][1]).tolist()
    assert found[2].size == 0


@on_each_launcher
def test_sizes_that_do_not_go_together(launcher: Launcher) -> None:
    good, short = row_operands(4, (3, 3), 1, torch.float32)[0], row_operands(3, (3, 3), 1, torch.float32)[0]
    with pytest.raises(ValueError, match=r"out has \[4, 4, 12, 12\] elements, an operand \[3, 3, 9, 9\]"):
        launcher.combine(good, [good, short], CombineSpec(rows_op()))
    ragged = (*good[:2], torch.ones(13), good[3])
    with pytest.raises(ValueError, match="lane 'row' has 13 elements, which is not a whole multiple of"):
        launcher.combine(ragged, [ragged], CombineSpec(rows_op()))
    with pytest.raises(ValueError, match="operator 'keep_row' takes 4 lanes, got 1"):
        launcher.combine(good[0], [good[0]], CombineSpec(rows_op()))

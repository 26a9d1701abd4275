"""The test matrix as data: algorithm × operator × dtype. A new algorithm adds one row here, a new dtype one word.

What a row says of its algorithm is derived by hand from the algorithm's definition, never from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
    "CHOSEN",
    "DTYPES",
    "FLOATS",
    "ILLEGAL",
    "LEGAL",
    "OPS",
    "ROWS",
    "Cell",
    "Row",
    "children",
    "height",
    "row_of",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

OPS: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("sum", "prod", "min", "max"), DTYPES),
    "avg": FLOATS,
    **dict.fromkeys(("band", "bor", "bxor"), (*INTEGERS, torch.bool)),
}
"""Operator -> the dtypes on which it has a meaning."""

PerRank = Callable[[int, int], int]  # of rank and world_size


def children(rank: int, world_size: int) -> int:
    """How many of 2r + 1 and 2r + 2 are ranks."""
    return (2 * rank + 1 < world_size) + (2 * rank + 2 < world_size)


def height(world_size: int) -> int:
    """Of the tree: floor(log2 n)."""
    return world_size.bit_length() - 1


def _is_child(rank: int) -> int:
    return int(rank > 0)


def _tree_messages(rank: int, world_size: int) -> int:
    return children(rank, world_size) + _is_child(rank)


def _tree_steps(rank: int, world_size: int) -> int:
    return 2 * ((children(rank, world_size) > 0) + _is_child(rank))


@dataclass(frozen=True)
class Row:
    """An algorithm, and what is known of it.

    Attributes:
        algorithm, order: the arguments of ``all_reduce``.
        messages: what a rank sends, in chunks, and as much it receives.
        is_chunked: a chunk is 1/world_size of the tensor, else all of it.
        steps: in how many steps a rank sends or receives.
        length: steps from the first to the last, of all ranks.
        additions: roundings of the accumulation type on the longest way of a contribution.
        roundings: the same of the tensor's type, where that is narrower than the accumulation type.
        slices: how many are staged on the rank that stages most, where nothing is combined as it arrives.
        rank_order: the result is the left fold in rank order.
        same_bits: the ranks end with the same bits.
    """

    algorithm: str | None
    order: str | None
    messages: PerRank
    is_chunked: bool
    steps: PerRank
    length: Callable[[int], int]
    additions: Callable[[int], int]
    roundings: Callable[[int], int]
    slices: Callable[[int], int]
    rank_order: bool = False
    same_bits: bool = True


_all_but_one = lambda n: n - 1  # noqa: E731 - one word for the many n - 1 below
_once = lambda n: 1  # noqa: E731
_two = lambda n: 2  # noqa: E731

ROWS: dict[str, Row] = {
    "naive": Row(
        algorithm="naive",
        order=None,
        messages=lambda rank, n: 1 if rank else n - 1,
        is_chunked=False,
        steps=lambda rank, n: 2 if rank else 2 * (n - 1),
        length=lambda n: 2 * (n - 1),
        additions=_all_but_one,
        roundings=_once,
        slices=_two,
        rank_order=True,
    ),
    "tree": Row(
        algorithm="tree",
        order=None,
        messages=_tree_messages,
        is_chunked=False,
        steps=_tree_steps,
        length=lambda n: 2 * height(n),
        additions=lambda n: min(n - 1, 2 * height(n)),
        roundings=height,
        slices=_two,
    ),
    "ring": Row(
        algorithm="ring",
        order=None,
        messages=lambda rank, n: 2 * (n - 1),
        is_chunked=True,
        steps=lambda rank, n: 2 * (n - 1),
        length=lambda n: 2 * (n - 1),
        additions=_all_but_one,
        roundings=_all_but_one,
        slices=_two,
    ),
    "full_ring": Row(
        algorithm="full_ring",
        order=None,
        messages=lambda rank, n: n - 1,
        is_chunked=False,
        steps=lambda rank, n: n - 1,
        length=_all_but_one,
        additions=_all_but_one,
        roundings=_all_but_one,
        slices=_two,
        same_bits=False,
    ),
    "full_ring in rank order": Row(
        algorithm="full_ring",
        order="rank",
        messages=lambda rank, n: n - 1,
        is_chunked=False,
        steps=lambda rank, n: n - 1,
        length=_all_but_one,
        additions=_all_but_one,
        roundings=_once,
        slices=lambda n: max(2, n - 1),
        rank_order=True,
    ),
    "direct": Row(
        algorithm="direct",
        order=None,
        messages=lambda rank, n: 2 * (n - 1),
        is_chunked=True,
        steps=lambda rank, n: 2,
        length=_two,
        additions=_all_but_one,
        roundings=_once,
        slices=lambda n: max(2, n - 1),
        rank_order=True,
    ),
}
"""Every all-reduce, by a name for test ids."""

CHOSEN = "chosen"
"""The row of ``algorithm=None``: what holds of it is what holds of the row that was chosen."""


def row_of(algorithm: str, order: str | None = None) -> Row:
    """The row of an algorithm; where there are two, ``order`` decides."""
    found = [row for row in ROWS.values() if row.algorithm == algorithm]
    return found[0] if len(found) == 1 else next(row for row in found if row.order == order)


class Cell(NamedTuple):
    """One combination; ``row`` is a key of ``ROWS``, or ``CHOSEN``."""

    row: str
    op: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.row} {self.op} {str(self.dtype).removeprefix('torch.')}"


LEGAL = [Cell(row, op, dtype) for row in (*ROWS, CHOSEN) for op, dtypes in OPS.items() for dtype in dtypes]
ILLEGAL = [
    Cell(row, op, dtype)
    for row in (*ROWS, CHOSEN)
    for op, dtypes in OPS.items()
    for dtype in DTYPES
    if dtype not in dtypes
]

"""The test matrix as data: algorithm × operator × dtype × wire type. An algorithm adds one row, a dtype one word.

What a row says of its algorithm is derived by hand from the algorithm's definition, never from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tests.matrix_folds import Order, around_the_ring, as_they_arrive, in_rank_order, up_the_tree

__all__ = [
    "CHOSEN",
    "COMPLEX",
    "DTYPES",
    "FLOATS8",
    "ILLEGAL",
    "ILLEGAL_WIRES",
    "LEGAL",
    "NARROW",
    "OPS",
    "ROWS",
    "WIRES",
    "Cell",
    "Row",
    "children",
    "height",
    "row_of",
]

FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (*FLOATS8, torch.float16, torch.bfloat16)
"""What is combined in float32."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
ORDERED = (*FLOATS, *INTEGERS, torch.bool, *FLOATS8, *UNSIGNED)
DTYPES = (*ORDERED, *COMPLEX)

OPS: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("sum", "prod"), DTYPES),
    **dict.fromkeys(("min", "max"), ORDERED),
    "avg": (*FLOATS, *FLOATS8, *COMPLEX),
    **dict.fromkeys(("band", "bor", "bxor"), (*INTEGERS, torch.bool, *UNSIGNED)),
}
"""Operator -> the dtypes on which it has a meaning."""

WIRES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    dtype: tuple(
        wire
        for wire in (*FLOATS, *FLOATS8)
        if wire != dtype and not (torch.float64 in (dtype, wire) and {dtype, wire} & {*NARROW})
    )
    for dtype in (*FLOATS, *FLOATS8)
}
"""Dtype -> what can travel in its place: another float, but between float64 and 16 or 8 bits nothing rounds once."""

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
        roundings: the same of the type that travels, where that is narrower than the accumulation type.
        orders: of rank and world_size; an element of that rank's result is folded in one of these ways.
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
    orders: Callable[[int, int], list[Order]]
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
        orders=in_rank_order,
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
        orders=up_the_tree,
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
        orders=around_the_ring,
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
        orders=as_they_arrive,
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
        orders=in_rank_order,
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
        orders=in_rank_order,
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
    """One combination; ``row`` is a key of ``ROWS``, or ``CHOSEN``. ``wire`` travels, if it is not None."""

    row: str
    op: str
    dtype: torch.dtype
    wire: torch.dtype | None = None

    @property
    def travels(self) -> torch.dtype:
        return self.wire or self.dtype

    @property
    def is_new(self) -> bool:
        """Of the types that came later, which are tried with fewer examples."""
        return self.wire is not None or self.dtype in (*FLOATS8, *UNSIGNED, *COMPLEX)

    def __str__(self) -> str:
        wire = f" as {str(self.wire).removeprefix('torch.')}" if self.wire else ""
        return f"{self.row} {self.op} {str(self.dtype).removeprefix('torch.')}{wire}"


LEGAL = [
    Cell(row, op, dtype, wire)
    for row in (*ROWS, CHOSEN)
    for op, dtypes in OPS.items()
    for dtype in dtypes
    for wire in (None, *WIRES.get(dtype, ()))
]
ILLEGAL = [
    Cell(row, op, dtype)
    for row in (*ROWS, CHOSEN)
    for op, dtypes in OPS.items()
    for dtype in DTYPES
    if dtype not in dtypes
]
_ILLEGAL_WIRES = [
    (op, dtype, wire)
    for op, dtypes in OPS.items()
    for dtype in dtypes
    for wire in DTYPES
    if wire != dtype and wire not in WIRES.get(dtype, ())
]
ILLEGAL_WIRES = [
    Cell([*ROWS, CHOSEN][number % (1 + len(ROWS))], op, dtype, wire)
    for number, (op, dtype, wire) in enumerate(_ILLEGAL_WIRES)
]
"""Each once, by the rows in turn."""

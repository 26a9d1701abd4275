"""Schedules as data: what one rank sends, receives and combines in each step.

A rank holds its own copy of every chunk (``OWN``), into which results accumulate, and staged values that arrived
and wait to be folded or forwarded, each under a key of its own. One step reads before it writes: all its sends
carry the values from before the step, then its receives land, then its folds run in order.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

__all__ = [
    "OWN",
    "Fold",
    "Keep",
    "Ranks",
    "Recv",
    "Send",
    "Step",
    "cyclic",
    "everyone",
    "iter_ranks",
    "num_ranks",
    "only",
]

OWN: Final = -1
"""The key of a rank's own copy of a chunk; every other key names a staged value."""

Ranks = tuple[range, ...]
"""A set of ranks as a few ranges, so that a schedule of 100,000 ranks can name one without listing it."""


def only(rank: int) -> Ranks:
    """The set of one rank."""
    return (range(rank, rank + 1),)


def everyone(world_size: int) -> Ranks:
    """The set of all ranks."""
    return (range(world_size),)


def cyclic(start: int, count: int, world_size: int) -> Ranks:
    """``count`` ranks from ``start`` on, wrapping from the last rank to rank 0."""
    start %= world_size
    stop = start + count
    if stop <= world_size:
        return (range(start, stop),)
    return (range(start, world_size), range(stop - world_size))


def num_ranks(ranks: Ranks) -> int:
    """How many ranks the set holds."""
    return sum(len(part) for part in ranks)


def iter_ranks(ranks: Ranks) -> Iterator[int]:
    """The ranks of the set, one by one."""
    for part in ranks:
        yield from part


@dataclass(frozen=True, slots=True)
class Send:
    """Sends chunk ``chunk`` to ``peer``: the rank's own copy, or the staged value under ``key``."""

    peer: int
    chunk: int
    key: int = OWN


@dataclass(frozen=True, slots=True)
class Recv:
    """Receives chunk ``chunk`` from ``peer``: over the rank's own copy, or to be staged under ``key``.

    ``carries`` states whose contributions arrive, so that coverage is checked and means are weighted without
    knowing the other ranks' schedules. A (chunk, key) pair is staged at most once in a schedule.
    """

    peer: int
    chunk: int
    carries: Ranks
    key: int = OWN


@dataclass(frozen=True, slots=True)
class Keep:
    """Before the step's transfers, stages a copy of the rank's own chunk under ``key``."""

    chunk: int
    key: int


@dataclass(frozen=True, slots=True)
class Fold:
    """After the step's receives, ``own[chunk] = operands[0] ∘ operands[1] ∘ …`` from the left, rounded once."""

    chunk: int
    operands: tuple[int, ...]


Transfer = Send | Recv


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers in flight together, what is kept before them and what is folded after them."""

    transfers: tuple[Transfer, ...] = ()
    keeps: tuple[Keep, ...] = ()
    folds: tuple[Fold, ...] = ()

    @property
    def sends(self) -> Iterable[Send]:
        return (each for each in self.transfers if isinstance(each, Send))

    @property
    def receives(self) -> Iterable[Recv]:
        return (each for each in self.transfers if isinstance(each, Recv))

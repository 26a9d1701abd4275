"""A schedule: an algorithm applied to a number of ranks.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from microddp.schedule.chunks import aligned_span, equal_span
from microddp.schedule.ir import Send, Step
from microddp.schedule.registry import Algorithm, Collective, find_algorithm
from microddp.schedule.render import render
from microddp.schedule.verify import Proof, verify

__all__ = ["Schedule", "schedule"]


@dataclass(frozen=True)
class Schedule:
    """What every rank does, as data. Steps are made as they are asked for; nothing is stored.

    Attributes:
        entry: the algorithm.
        world_size: number of ranks.
        root: the root of a broadcast or reduce, else 0.
    """

    entry: Algorithm
    world_size: int
    root: int = 0

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self.entry.name

    @property
    def collective(self) -> Collective:
        """What it achieves: all_reduce, reduce_scatter, all_gather, broadcast or reduce."""
        return self.entry.collective

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the tensor is cut."""
        return self.world_size if self.entry.num_chunks == "world_size" else self.entry.num_chunks

    def steps(self, rank: int) -> Iterator[Step]:
        """The steps of one rank, made one by one.

        Raises:
            ValueError: ``rank`` is not one of world_size.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        options = {"root": self.root} if self.entry.rooted else {}
        return self.entry.steps(rank, self.world_size, **options)

    def chunk_span(self, chunk: int, numel: int, itemsize: int) -> tuple[int, int]:
        """The [start, stop) of a chunk in elements: 16-byte aligned, or, in reduce_scatter and all_gather, equal."""
        is_equal = self.collective in ("reduce_scatter", "all_gather")
        return (equal_span if is_equal else aligned_span)(chunk, self.num_chunks, numel, itemsize)

    def result_chunks(self, rank: int) -> Sequence[int]:
        """The chunks that hold a result on ``rank`` at the end."""
        if self.collective == "reduce_scatter":
            return (rank,)
        return () if self.collective == "reduce" and rank != self.root else range(self.num_chunks)

    def verify(self) -> Proof:
        """Proves it: every contribution exactly once, in a known order, all transfers matched, no deadlock.

        Raises:
            ScheduleError: naming rank, step and chunk.
        """
        return verify(self)

    def render(self) -> str:
        """The timetable as text: a row for each step, a column for each rank."""
        return render(self)

    def num_steps(self, rank: int = 0) -> int:
        """How many steps ``rank`` takes."""
        return sum(1 for _ in self.steps(rank))

    def bytes_sent(self, rank: int, nbytes: int) -> int:
        """How many bytes ``rank`` sends when the tensor has ``nbytes``."""
        return self._count(rank, nbytes, sends=True)

    def bytes_received(self, rank: int, nbytes: int) -> int:
        """How many bytes ``rank`` receives when the tensor has ``nbytes``."""
        return self._count(rank, nbytes, sends=False)

    def _count(self, rank: int, nbytes: int, *, sends: bool) -> int:
        total = 0
        for step in self.steps(rank):
            for each in step.transfers:
                if isinstance(each, Send) is sends:
                    start, stop = self.chunk_span(each.chunk, nbytes, 1)
                    total += stop - start
        return total


def schedule(name: str, world_size: int, *, root: int = 0, order: str | None = None) -> Schedule:
    """The schedule of algorithm ``name`` over ``world_size`` ranks.

    Args:
        name: "naive", "tree", "ring", "full_ring", "direct", "reduce_scatter", "all_gather", "broadcast", "reduce", or
            one that was added with ``@microddp.algorithm``.
        world_size: number of ranks, at least 1.
        root: of a broadcast or reduce.
        order: "rank" for the variant that combines in rank order.

    Raises:
        ValueError: unknown name or order, or a world_size or root that is out of range.
        TypeError: world_size or root is not an int.
    """
    for value, label in ((world_size, "world_size"), (root, "root")):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{label} must be an int, not {type(value).__name__}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    entry = find_algorithm(name, order=order)
    if not 0 <= root < world_size:
        raise ValueError(f"root {root} is not one of {world_size} ranks")
    if root and not entry.rooted:
        raise ValueError(f"{entry.name} ({entry.collective}) has no root")
    return Schedule(entry, world_size, root)

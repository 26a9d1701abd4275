"""Derives a plan's dependencies from the spans that its instructions read and write."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from microddp.plan.instructions import Instruction, Span, reads, writes

__all__ = ["ancestors", "derive"]


class _Accesses:
    """Who last wrote, and who has read since, each piece of one buffer; pieces are cut where spans start and stop.

    Those are the only accesses that a later one can collide with first: whatever collides with an older access
    collides with the write that came in between too.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int | None, list[int]]] = []  # (the last writer, the readers since), to the next start

    def conflicts(self, span: Span, is_write: bool) -> set[int]:
        found: set[int] = set()
        for writer, readers in self._touched(span):
            if writer is not None:
                found.add(writer)
            if is_write:
                found.update(readers)
        return found

    def read(self, span: Span, index: int) -> None:
        for _, readers in self._touched(span):
            readers.append(index)

    def write(self, span: Span, index: int) -> None:
        first, last = self._cut(span.start), self._cut(span.stop)
        self._starts[first:last] = [span.start]
        self._pieces[first:last] = [(index, [])]

    def _touched(self, span: Span) -> list[tuple[int | None, list[int]]]:
        first, last = self._cut(span.start), self._cut(span.stop)
        return self._pieces[first:last]

    def _cut(self, at: int) -> int:
        """The number of the piece that starts at ``at``, made by cutting the one that holds it."""
        place = bisect_left(self._starts, at)
        if place == len(self._starts) or self._starts[place] != at:
            writer, readers = self._pieces[place - 1] if place else (None, [])
            self._starts.insert(place, at)
            self._pieces.insert(place, (writer, list(readers)))
        return place


def derive(instructions: Sequence[Instruction]) -> tuple[tuple[int, ...], ...]:
    """For each instruction the earlier ones that it must follow: read after write, write after read or write.

    Transitively reduced: a dependency that others imply is left out, so each one that stays is needed.
    """
    buffers: dict[int, _Accesses] = {}
    before: list[int] = []  # before[i]: bit j is set if j must be complete before i
    after = []
    for index, instruction in enumerate(instructions):
        read, written = reads(instruction), writes(instruction)
        candidates: set[int] = set()
        for span, is_write in [(each, False) for each in read] + [(each, True) for each in written]:
            candidates |= buffers.setdefault(span.buffer, _Accesses()).conflicts(span, is_write)
        kept, implied = [], 0
        for candidate in sorted(candidates, reverse=True):
            if not implied >> candidate & 1:
                kept.append(candidate)
                implied |= before[candidate] | 1 << candidate
        before.append(implied)
        after.append(tuple(reversed(kept)))
        for span in read:
            buffers[span.buffer].read(span, index)
        for span in written:
            buffers[span.buffer].write(span, index)
    return tuple(after)


def ancestors(after: Sequence[Sequence[int]]) -> list[int]:
    """For each instruction a bit mask of all that must be complete before it, directly or not."""
    before: list[int] = []
    for direct in after:
        mask = 0
        for each in direct:
            mask |= before[each] | 1 << each
        before.append(mask)
    return before

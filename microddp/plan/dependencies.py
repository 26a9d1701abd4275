"""Derives a plan's dependencies from the spans that its instructions read and write."""

from __future__ import annotations

from collections.abc import Sequence

from microddp.plan.instructions import Instruction, Span, reads, writes

__all__ = ["ancestors", "derive"]


class _Accesses:
    """The accesses to one buffer that a later access could still collide with."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int, bool]] = []

    def conflicts(self, span: Span, is_write: bool) -> set[int]:
        return {
            index
            for start, stop, index, wrote in self._seen
            if start < span.stop and span.start < stop and (wrote or is_write)
        }

    def add(self, span: Span, index: int, is_write: bool) -> None:
        if is_write:  # Whatever collides with what this covers collides with this write too.
            self._seen = [each for each in self._seen if each[0] < span.start or each[1] > span.stop]
        self._seen.append((span.start, span.stop, index, is_write))


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
            buffers[span.buffer].add(span, index, False)
        for span in written:
            buffers[span.buffer].add(span, index, True)
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

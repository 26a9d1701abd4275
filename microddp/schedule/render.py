"""The timetable of a schedule as text.

Standard library only.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from microddp.schedule.ir import OWN, Send, Step

if TYPE_CHECKING:
    from microddp.schedule.schedule import Schedule

__all__ = ["render", "step_text"]


def step_text(step: Step) -> str:
    """One rank's step: ``c2->1`` sends chunk 2 to rank 1, ``c1<-0`` receives.

    ``.k2`` names a staged value, where it is not simply what the peer of a receive sent.
    """
    words = [f"keep k{keep.key}" for keep in step.keeps]
    for each in step.transfers:
        is_send = isinstance(each, Send)
        named = each.key != OWN if is_send else each.key not in (OWN, each.peer)
        words.append(f"c{each.chunk}{f'.k{each.key}' if named else ''}{'->' if is_send else '<-'}{each.peer}")
    words += ["fold"] * len(step.folds)
    return " ".join(words) or "."


def render(schedule: Schedule) -> str:
    """A table with one row for each step and one column for each rank."""
    n = schedule.world_size
    rows = [["step", *(f"rank {rank}" for rank in range(n))]]
    for number, steps in enumerate(zip_longest(*(schedule.steps(rank) for rank in range(n)), fillvalue=Step())):
        rows.append([str(number), *(step_text(step) for step in steps)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    size = f"{n} ranks, {schedule.num_chunks} chunks, {len(rows) - 1} steps"
    title = f"{schedule.algorithm} ({schedule.collective}): {size}"
    return "\n".join([title, *lines]) + "\n"

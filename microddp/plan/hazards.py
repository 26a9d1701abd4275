"""Checks that a plan is free from races, without the code that derived its dependencies."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from microddp.errors import PlanError
from microddp.plan.instructions import Plan, Span, reads, writes

__all__ = ["Race", "check_races", "find_races"]


@dataclass(frozen=True, slots=True)
class Race:
    """Two instructions that touch the same elements, at least one writing, in no given order."""

    first: int
    second: int
    span: Span


def find_races(plan: Plan) -> list[Race]:
    """Every pair of instructions that could collide. Instructions are taken to start as soon as ``after`` allows.

    Each buffer is cut at every start and stop of a span; within a piece, each write must be ordered with every other
    access by a path of dependencies.

    Raises:
        PlanError: an instruction depends on a later one.
    """
    follows = _reachable(plan)
    races: dict[tuple[int, int], Race] = {}
    for piece, accesses in _pieces(plan):
        for place, (first, wrote_first) in enumerate(accesses):
            for second, wrote_second in accesses[place + 1 :]:
                ordered = first == second or (follows[first] >> second | follows[second] >> first) & 1
                if (wrote_first or wrote_second) and not ordered:
                    races.setdefault((first, second), Race(first, second, piece))
    return list(races.values())


def check_races(plan: Plan) -> None:
    """Raises PlanError if the plan has a race."""
    races = find_races(plan)
    if races:
        race = races[0]
        pair = f"{plan.instructions[race.first]} and {plan.instructions[race.second]}"
        raise PlanError(f"rank {plan.rank}: {len(races)} races; instructions {race.first} and {race.second}: {pair}")


def _reachable(plan: Plan) -> list[int]:
    """For each instruction a bit mask of those that can only start after it."""
    follows = [0] * len(plan.instructions)
    for index in reversed(range(len(plan.instructions))):
        for each in plan.after[index]:
            if not 0 <= each < index:
                raise PlanError(f"rank {plan.rank}: instruction {index} depends on {each}, which is not an earlier one")
            follows[each] |= follows[index] | 1 << index
    return follows


def _pieces(plan: Plan) -> list[tuple[Span, list[tuple[int, bool]]]]:
    spans = [
        (span, index, is_write)
        for index, instruction in enumerate(plan.instructions)
        for is_write, touched in ((False, reads(instruction)), (True, writes(instruction)))
        for span in touched
    ]
    pieces = []
    for buffer in range(len(plan.buffers)):
        here = [each for each in spans if each[0].buffer == buffer]
        cuts = sorted({cut for span, _, _ in here for cut in (span.start, span.stop)})
        accesses: list[list[tuple[int, bool]]] = [[] for _ in cuts]
        for span, index, is_write in here:
            for place in range(bisect_left(cuts, span.start), bisect_left(cuts, span.stop)):
                accesses[place].append((index, is_write))
        pieces += [(Span(buffer, *ends), touching) for ends, touching in zip(pairwise(cuts), accesses)]
    return pieces

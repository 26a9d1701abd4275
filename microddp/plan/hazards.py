"""Checks that a plan is free from races, without the code that derived its dependencies."""

from __future__ import annotations

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
    """
    follows = _reachable(plan)
    races: dict[tuple[int, int], Race] = {}
    for piece, accesses in _pieces(plan):
        for place, (first, wrote_first) in enumerate(accesses):
            for second, wrote_second in accesses[place + 1 :]:
                ordered = first == second or second in follows[first] or first in follows[second]
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


def _reachable(plan: Plan) -> list[set[int]]:
    follows: list[set[int]] = [set() for _ in plan.instructions]
    successors: list[list[int]] = [[] for _ in plan.instructions]
    for index, direct in enumerate(plan.after):
        for each in direct:
            successors[each].append(index)
    for start in range(len(plan.instructions)):
        stack = [start]
        while stack:
            for each in successors[stack.pop()]:
                if each not in follows[start]:
                    follows[start].add(each)
                    stack.append(each)
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
        for start, stop in pairwise(cuts):
            touching = [each[1:] for each in here if each[0].start <= start and stop <= each[0].stop]
            pieces.append((Span(buffer, start, stop), touching))
    return pieces

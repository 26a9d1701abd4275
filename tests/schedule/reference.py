"""Schedules as the tests see them: tables that can be edited, and a plain interpreter to run them on real values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from microddp.schedule import OWN, Recv, Schedule, Send, Step, algorithm_names, schedule

Table = list[list[Step]]
"""``table[rank][step]``: all of a schedule, in lists."""

Edge = tuple[int, int]  # (source, target)


class Stuck(Exception):
    """The interpreter cannot go on, or a rank uses what it does not hold."""


def every_schedule(world_size: int, *, roots: Sequence[int] = (0,)) -> Iterator[Schedule]:
    """Each algorithm over ``world_size`` ranks, full_ring in rank order too, rooted ones at each of ``roots``."""
    for name in algorithm_names():
        rooted = schedule(name, 1).entry.rooted
        for root in roots if rooted else (0,):
            yield schedule(name, world_size, root=root)
    yield schedule("full_ring", world_size, order="rank")


def label(each: Schedule) -> str:
    """Names a schedule in test ids."""
    variant = "-rank" if each.algorithm == "full_ring" and each.entry.rank_order else ""
    return f"{each.algorithm}{variant}-{each.world_size}" + (f"-root{each.root}" if each.root else "")


def table_of(each: Schedule) -> Table:
    """All steps of all ranks."""
    return [list(each.steps(rank)) for rank in range(each.world_size)]


def schedule_of(table: Table, like: Schedule, *, keep_facts: bool = False) -> Schedule:
    """A schedule with the given steps, for the same collective; it declares no facts unless told to keep them."""
    entry = replace(like.entry, name="edited", steps=lambda rank, world_size, root=0: iter(table[rank]))
    if not keep_facts:
        entry = replace(entry, same_bits=False, rank_order=False)
    return Schedule(entry, len(table), like.root)


@dataclass
class _Actor:
    steps: list[Step]
    own: dict[int, Any]
    staged: dict[tuple[int, int], Any] = field(default_factory=dict)
    number: int = -1
    open: int = 0
    arrived: list[tuple[Recv, Any]] = field(default_factory=list)

    def value(self, chunk: int, key: int) -> Any:
        held = self.own.get(chunk) if key == OWN else self.staged.get((chunk, key))
        if held is None:
            raise Stuck(f"chunk {chunk}, key {key} is not held")
        return held


def play(each: Schedule, values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> list[dict[int, Any]]:
    """Runs a schedule on one value for each rank; returns what each rank's own chunks hold at the end.

    Every chunk of rank r starts as ``values[r]``, where the collective says that r starts with it. Transfers complete
    only when both ends are in reach; a rank takes its next step when all its transfers are complete.
    """
    actors = [_Actor(steps, _start(each, rank, values[rank])) for rank, steps in enumerate(table_of(each))]
    sends: dict[Edge, list[Any]] = {}
    receives: dict[Edge, list[Recv]] = {}
    moved = True
    while moved:
        moved = False
        for rank, actor in enumerate(actors):
            if actor.open == 0 and actor.number < len(actor.steps):
                _finish_step(actor, combine)
                actor.number += 1
                moved = True
                if actor.number < len(actor.steps):
                    _post(rank, actor, sends, receives)
        for edge in sends.keys() & receives.keys():
            while sends[edge] and receives[edge]:
                receive = receives[edge].pop(0)
                actors[edge[1]].arrived.append((receive, sends[edge].pop(0)))
                for end in edge:
                    actors[end].open -= 1
                moved = True
    if any(actor.number < len(actor.steps) for actor in actors):
        raise Stuck("deadlock")
    return [actor.own for actor in actors]


def _start(each: Schedule, rank: int, value: Any) -> dict[int, Any]:
    if each.collective == "all_gather":
        return {rank: value}
    if each.collective == "broadcast" and rank != each.root:
        return {}
    return dict.fromkeys(range(each.num_chunks), value)


def _post(
    rank: int, actor: _Actor, sends: dict[tuple[int, int], list[Any]], receives: dict[tuple[int, int], list[Recv]]
) -> None:
    step = actor.steps[actor.number]
    for keep in step.keeps:
        actor.staged[keep.chunk, keep.key] = actor.value(keep.chunk, OWN)
    for each in step.transfers:
        actor.open += 1
        if isinstance(each, Send):
            sends.setdefault((rank, each.peer), []).append(actor.value(each.chunk, each.key))
        else:
            receives.setdefault((each.peer, rank), []).append(each)


def _finish_step(actor: _Actor, combine: Callable[[Any, Any], Any]) -> None:
    for receive, value in actor.arrived:
        if receive.key == OWN:
            actor.own[receive.chunk] = value
        else:
            actor.staged[receive.chunk, receive.key] = value
    actor.arrived.clear()
    for fold in actor.steps[actor.number].folds if actor.number >= 0 else ():
        total = actor.value(fold.chunk, fold.operands[0])
        for key in fold.operands[1:]:
            total = combine(total, actor.value(fold.chunk, key))
        actor.own[fold.chunk] = total


def expected(each: Schedule, chunk: int, values: Sequence[int]) -> int:
    """What a result chunk holds when ``combine`` is addition."""
    if each.collective == "all_gather":
        return values[chunk]
    return values[each.root] if each.collective == "broadcast" else sum(values)


def is_right(each: Schedule) -> bool:
    """Whether the interpreter's sums are right on every rank, told apart by powers of a base beyond any count."""
    values = [100**rank for rank in range(each.world_size)]
    try:
        own = play(each, values, lambda left, right: left + right)
    except Stuck:
        return False
    return all(
        own[rank].get(chunk) == expected(each, chunk, values)
        for rank in range(each.world_size)
        for chunk in each.result_chunks(rank)
    )

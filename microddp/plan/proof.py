"""Proves plans: runs all ranks' plans on symbols, through their real spans, in many legal orders.

Freedom from races (``hazards``) says that the outcome does not depend on timing, not that it is right: dependencies
derived from spans make a wrong program race-free too. Here each element carries which element it is and the term of
what it holds; at the end every element must be itself and hold the term that the schedule's own proof gives its chunk.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Literal, get_args

from microddp.errors import PlanError
from microddp.plan.instructions import DATA, Combine, Copy, Plan, Recv, RecvCombine, Send, is_transfer, reads, writes
from microddp.plan.memory import NOTHING, Memory, Token
from microddp.schedule import Schedule
from microddp.schedule.terms import Terms

__all__ = ["Mode", "prove"]

Mode = Literal["any", "host", "stream"]

Edge = tuple[int, int]  # (source, target)


def prove(
    schedule: Schedule,
    plans: Sequence[Plan],
    *,
    mode: Mode = "any",
    seed: int = 0,
    wide: bool = False,
    divides: bool = False,
    means: bool = False,
    wire: bool = False,
) -> None:
    """Plays ``plans`` (one for each rank) once and compares every element with the schedule's proof.

    Args:
        mode: what may run when. "any": whatever its dependencies allow, transfers of an edge in posting order (a pool
            of workers). "host": in order, the host waits for an instruction's dependencies and then issues it.
            "stream": in order, and a group of transfers is complete before the next instruction starts.
        seed: of the choice among what may run.
        wide, divides, means: as in LoweringConfig: a fold in rank order must be rounded only once, every result must be
            divided exactly once, or weighted truthfully.
        wire: as in LoweringConfig: nothing may travel, or be folded in rank order, in the data's own type.

    Raises:
        PlanError: a wrong term, a wrong weight or divisor, transfers that do not match, or a deadlock.
        ValueError: an unknown mode, or not one plan of one size for each rank.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
    found = [(plan.rank, plan.world_size, plan.numel, plan.itemsize) for plan in plans]
    if [each[:2] for each in found] != [(rank, schedule.world_size) for rank in range(schedule.world_size)]:
        raise ValueError(f"expected a plan for each of {schedule.world_size} ranks, got (rank, world_size) {found}")
    if len({each[2:] for each in found}) > 1:
        raise ValueError(f"plans of different sizes: (rank, world_size, numel, itemsize) {found}")
    if wire:
        _check_wire(plans, in_order=schedule.entry.rank_order)
    terms = Terms()
    ranks = [_Rank(plan, mode, Memory(schedule, plan, terms)) for plan in plans]
    _play(ranks, random.Random(seed))
    travels_as_mean = means and not schedule.entry.rank_order
    wanted = _expected(schedule, terms, wide=wide)
    _check_results(schedule, ranks, wanted, terms, divides=divides and not travels_as_mean)
    _check_weights(ranks, weighed=travels_as_mean)


class _Rank:
    """One rank's memory, and which of its instructions are issued and complete."""

    def __init__(self, plan: Plan, mode: Mode, memory: Memory) -> None:
        self.plan, self.mode, self.memory = plan, mode, memory
        self.num_issued = 0
        self.in_flight: set[int] = set()
        self.complete: set[int] = set()
        self.posted: dict[Edge, deque[int]] = {}
        self.unmet = [len(direct) for direct in plan.after]
        self.followers: list[list[int]] = [[] for _ in plan.instructions]
        self.lanes: dict[Edge, deque[int]] = {}  # what is still to be posted on each edge, in order
        for index, direct in enumerate(plan.after):
            for each in direct:
                self.followers[each].append(index)
            if is_transfer(plan.instructions[index]):
                self.lanes.setdefault(self.edge(index), deque()).append(index)
        self.ready = [index for index in range(len(self.unmet)) if self._may_start(index)]

    def startable(self) -> Sequence[int]:
        """The instructions that may be issued now."""
        if self.mode == "any":
            return self.ready
        index = self.num_issued  # in order
        if index == len(self.unmet) or self.unmet[index]:
            return ()
        return () if self.mode == "stream" and not self._in_group_in_flight(index) else (index,)

    def _may_start(self, index: int) -> bool:
        local = not is_transfer(self.plan.instructions[index])
        return not self.unmet[index] and (local or self.lanes[self.edge(index)][0] == index)

    def _in_group_in_flight(self, index: int) -> bool:
        here = self.plan.instructions[index]
        in_flight = [self.plan.instructions[each] for each in self.in_flight]
        return all(is_transfer(here) and (each.step, each.slice) == (here.step, here.slice) for each in in_flight)

    def edge(self, index: int) -> Edge:
        """(source, target) of a transfer."""
        instruction, me = self.plan.instructions[index], self.plan.rank
        assert isinstance(instruction, (Send, Recv, RecvCombine))
        return (me, instruction.peer) if isinstance(instruction, Send) else (instruction.peer, me)

    def issue(self, index: int) -> Edge | None:
        """Runs a local instruction, or posts a transfer and returns its edge."""
        instruction = self.plan.instructions[index]
        self.num_issued += 1
        if self.mode == "any":
            self.ready.remove(index)
        if isinstance(instruction, Copy):
            self.memory.write(instruction.out, self.memory.read(instruction.source))
        elif isinstance(instruction, Combine):
            self.memory.fold(instruction)
        else:
            edge = self.edge(index)
            self.in_flight.add(index)
            self.posted.setdefault(edge, deque()).append(index)
            lane = self.lanes[edge]
            lane.popleft()
            if lane and self._may_start(lane[0]):
                self.ready.append(lane[0])
            return edge
        self._finish(index)
        return None

    def arrive(self, index: int, tokens: list[Token]) -> None:
        """Completes a receive with what the peer sent."""
        instruction = self.plan.instructions[index]
        if isinstance(instruction, RecvCombine):
            if len(tokens) != len(instruction.out):
                raise PlanError(f"rank {self.plan.rank} receives {len(tokens)} elements: {instruction}")
            self.memory.fold(instruction, tokens)
        elif isinstance(instruction, Recv):
            self.memory.write(instruction.out, tokens)
        self._finish(index)

    def sent(self, index: int) -> None:
        """Completes a send."""
        self._finish(index)

    def awaited(self) -> str:
        """The first instruction that is not complete."""
        index = min(set(range(len(self.plan.instructions))) - self.complete)
        return f"instruction {index}, {self.plan.instructions[index]}"

    def _finish(self, index: int) -> None:
        self.in_flight.discard(index)
        self.complete.add(index)
        for each in self.followers[index]:
            self.unmet[each] -= 1
            if self._may_start(each):
                self.ready.append(each)


def _play(ranks: list[_Rank], chance: random.Random) -> None:
    matches: list[Edge] = []  # edges with something posted on both ends
    while True:
        moves = [rank.startable() for rank in ranks]
        num_moves = sum(map(len, moves))
        if not num_moves and not matches:
            break
        choice = chance.randrange(num_moves + len(matches))
        if choice >= num_moves:
            edge = matches[choice - num_moves]
            if not _move(ranks[edge[0]], ranks[edge[1]], edge):
                matches.remove(edge)
            continue
        for rank, startable in zip(ranks, moves):
            if choice < len(startable):
                posted = rank.issue(startable[choice])
                if posted and posted not in matches and all(ranks[each].posted.get(posted) for each in posted):
                    matches.append(posted)
                break
            choice -= len(startable)
    stuck = [rank for rank in ranks if len(rank.complete) < len(rank.plan.instructions)]
    if stuck:
        raise PlanError(
            f"deadlock: {'; '.join(f'rank {each.plan.rank} waits for {each.awaited()}' for each in stuck[:4])}"
        )


def _move(source: _Rank, target: _Rank, edge: Edge) -> bool:
    """Carries one message over the edge; whether another can follow."""
    sent, received = source.posted[edge].popleft(), target.posted[edge].popleft()
    send, receive = source.plan.instructions[sent], target.plan.instructions[received]
    assert isinstance(send, Send)
    if (send.step, send.slice) != (receive.step, receive.slice):
        raise PlanError(f"rank {edge[0]}'s {send} meets rank {edge[1]}'s {receive}")
    target.arrive(received, source.memory.read(send.source))
    source.sent(sent)
    return bool(source.posted[edge] and target.posted[edge])


def _check_results(
    schedule: Schedule, ranks: list[_Rank], wanted: dict[tuple[int, int], int], terms: Terms, *, divides: bool
) -> None:
    divides = divides and schedule.collective in ("all_reduce", "reduce", "reduce_scatter") and schedule.world_size > 1
    for rank in ranks:
        for chunk in schedule.result_chunks(rank.plan.rank):
            start, stop = schedule.chunk_span(chunk, rank.plan.numel, rank.plan.itemsize)
            term = wanted[rank.plan.rank, chunk]
            if divides:
                term = terms.fold([term])
            for element in range(start, stop):
                held = rank.memory.buffers[DATA][element]
                if held != (element, term):
                    text = "nothing" if held == NOTHING else f"{terms.text(held[1])} of element {held[0]}"
                    where = f"rank {rank.plan.rank}, element {element} (chunk {chunk})"
                    raise PlanError(f"{where} ends as {text}, the schedule says {terms.text(term)}")


def _expected(schedule: Schedule, terms: Terms, *, wide: bool) -> dict[tuple[int, int], int]:
    proof = schedule.verify()
    if wide and schedule.entry.rank_order and schedule.world_size > 1:  # one fold, rounded once
        flat = terms.fold([terms.leaf(rank) for rank in range(schedule.world_size)])
        return dict.fromkeys(proof.places(), flat)
    return {place: proof.term_in(terms, *place) for place in proof.places()}


def _check_wire(plans: Sequence[Plan], *, in_order: bool) -> None:
    for plan in plans:
        for each in plan.instructions:
            touched = writes(each)
            if in_order or isinstance(each, Send):
                touched += reads(each)
            if not isinstance(each, Copy) and any(span.buffer == DATA for span in touched):
                raise PlanError(f"rank {plan.rank}: {each} uses the data where it has to use the wire type")


def _check_weights(ranks: list[_Rank], *, weighed: bool) -> None:
    for rank in ranks:
        folds = [each for each in rank.plan.instructions if isinstance(each, (Combine, RecvCombine))]
        if any((each.weights is not None) is not weighed for each in folds):
            raise PlanError(f"rank {rank.plan.rank}: {'a fold has no' if weighed else 'a fold has'} weights")
        for stated, held in rank.memory.weighed:
            if stated != held:
                raise PlanError(f"rank {rank.plan.rank} weighs its operands {stated}; they cover {held} ranks")

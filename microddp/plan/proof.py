"""Proves plans: runs all ranks' plans on symbols, through their real spans, in many legal orders.

Freedom from races (``hazards``) says that the outcome does not depend on timing, not that it is right: dependencies
derived from spans make a wrong program race-free too. Here each element carries the term of what it holds, and at
the end every element must hold the term that the schedule's own proof gives its chunk.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from microddp.errors import PlanError
from microddp.plan.instructions import DATA, Combine, Copy, Plan, Recv, RecvCombine, Send, Span, is_transfer
from microddp.schedule import Schedule
from microddp.schedule.terms import Overlap, Terms

__all__ = ["Mode", "prove"]

Mode = Literal["any", "host", "stream"]

_POISON = -1


def prove(
    schedule: Schedule, plans: Sequence[Plan], *, mode: Mode = "any", seed: int = 0, divides: bool = False, means: bool = False
) -> None:
    """Plays ``plans`` (one for each rank) once and compares every element with the schedule's proof.

    Args:
        mode: what may run when. "any": whatever its dependencies allow, transfers of an edge in posting order (a pool
            of workers). "host": in order, the host waits for an instruction's dependencies and then issues it.
            "stream": in order, and a group of transfers is complete before the next instruction starts.
        seed: of the choice among what may run.
        divides, means: as in LoweringConfig: every result must be divided exactly once, or weighted truthfully.

    Raises:
        PlanError: a wrong term, a wrong weight or divisor, transfers that do not match, or a deadlock.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
    terms = Terms()
    ranks = [_Rank(plan, mode, terms, _initial(schedule, plan, terms)) for plan in plans]
    _play(ranks, random.Random(seed))
    travels_as_mean = means and not schedule.entry.rank_order
    _check_results(schedule, ranks, terms, divides=divides and not travels_as_mean)
    _check_weights(ranks, weighed=travels_as_mean)


class _Rank:
    """One rank's memory, and which of its instructions are issued and complete."""

    def __init__(self, plan: Plan, mode: Mode, terms: Terms, data: list[int]) -> None:
        self.plan, self.mode, self.terms = plan, mode, terms
        self.memory = [data, *([_POISON] * buffer.numel for buffer in plan.buffers[1:])]
        self.divided = [False] * len(data)
        self.issued: set[int] = set()
        self.complete: set[int] = set()
        self.posted: dict[tuple[int, int], deque[int]] = {}
        self.weighed: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def startable(self) -> Iterator[int]:
        """The instructions that may be issued now."""
        blocked = set()
        for index, instruction in enumerate(self.plan.instructions):
            if index in self.issued:
                continue
            edge = (instruction.peer, isinstance(instruction, Send)) if is_transfer(instruction) else None  # type: ignore[union-attr]
            free = all(each in self.complete for each in self.plan.after[index]) and self._turn(index)
            if free and edge not in blocked:
                yield index
            elif self.mode != "any":
                return
            if edge:
                blocked.add(edge)

    def _turn(self, index: int) -> bool:
        if self.mode == "any":
            return True
        here = self.plan.instructions[index]
        for earlier in range(index):
            if earlier not in self.issued:
                return False
            other = self.plan.instructions[earlier]
            same_group = is_transfer(here) and is_transfer(other) and (here.step, here.slice) == (other.step, other.slice)
            if self.mode == "stream" and earlier not in self.complete and not same_group:
                return False
        return True

    def issue(self, index: int) -> None:
        """Runs a local instruction; posts a transfer."""
        instruction = self.plan.instructions[index]
        self.issued.add(index)
        if isinstance(instruction, Copy):
            self.write(instruction.out, self.read(instruction.source))
        elif isinstance(instruction, Combine):
            self._fold(instruction, [self.read(each) for each in instruction.operands])
        else:
            me, peer = self.plan.rank, instruction.peer
            edge = (me, peer) if isinstance(instruction, Send) else (peer, me)
            self.posted.setdefault(edge, deque()).append(index)
            return
        self.complete.add(index)

    def arrive(self, index: int, values: list[int]) -> None:
        """Completes a receive with the values that the peer sent."""
        instruction = self.plan.instructions[index]
        if isinstance(instruction, RecvCombine):
            self._fold(instruction, [values if each is None else self.read(each) for each in instruction.operands])
        elif isinstance(instruction, Recv):
            self.write(instruction.out, values)
        self.complete.add(index)

    def read(self, span: Span) -> list[int]:
        values = self.memory[span.buffer][span.start : span.stop]
        if len(values) != len(span) or _POISON in values:
            raise PlanError(f"rank {self.plan.rank} reads {span}, which holds nothing yet")
        return values

    def write(self, span: Span, values: list[int]) -> None:
        if len(values) != len(span) or span.stop > len(self.memory[span.buffer]):
            raise PlanError(f"rank {self.plan.rank} writes {len(values)} elements into {span}")
        self.memory[span.buffer][span.start : span.stop] = values

    def _fold(self, instruction: Combine | RecvCombine, operands: list[list[int]]) -> None:
        try:
            values = [self.terms.fold(column) for column in zip(*operands, strict=True)]
        except (Overlap, ValueError) as error:
            raise PlanError(f"rank {self.plan.rank}: {instruction}: {error!r}") from error
        if instruction.weights is not None:
            counts = {tuple(bin(self.terms.mask(each)).count("1") for each in column) for column in zip(*operands)}
            self.weighed.extend((instruction.weights, each) for each in counts)
        full = (1 << self.plan.world_size) - 1
        if instruction.divisor is not None:
            if instruction.divisor != self.plan.world_size or any(self.terms.mask(each) != full for each in values):
                raise PlanError(f"rank {self.plan.rank} divides by {instruction.divisor} too early: {instruction}")
            values = [self.terms.fold([each]) for each in values]
        self.write(instruction.out, values)


def _initial(schedule: Schedule, plan: Plan, terms: Terms) -> list[int]:
    data = [_POISON] * plan.numel
    if schedule.collective == "broadcast" and plan.rank != schedule.root:
        return data
    chunks = [plan.rank] if schedule.collective == "all_gather" else range(schedule.num_chunks)
    for chunk in chunks:
        start, stop = schedule.chunk_span(chunk, plan.numel, plan.itemsize)
        data[start:stop] = [terms.leaf(plan.rank)] * (stop - start)
    return data


def _play(ranks: list[_Rank], chance: random.Random) -> None:
    while True:
        moves = [(rank, index) for rank in ranks for index in rank.startable()]
        matches = [
            (source, ranks[edge[1]], edge)
            for source in ranks
            for edge, queue in source.posted.items()
            if edge[0] == source.plan.rank and queue and ranks[edge[1]].posted.get(edge)
        ]
        if not moves and not matches:
            break
        choice = chance.randrange(len(moves) + len(matches))
        if choice < len(moves):
            moves[choice][0].issue(moves[choice][1])
        else:
            _move(*matches[choice - len(moves)])
    stuck = [rank for rank in ranks if len(rank.complete) < len(rank.plan.instructions)]
    if stuck:
        waits = [(r.plan.rank, str(r.plan.instructions[min(set(range(len(r.plan.after))) - r.complete)])) for r in stuck]
        raise PlanError(f"deadlock: {'; '.join(f'rank {rank} waits for {text}' for rank, text in waits[:4])}")


def _move(source: _Rank, target: _Rank, edge: tuple[int, int]) -> None:
    sent, received = source.posted[edge].popleft(), target.posted[edge].popleft()
    send, receive = source.plan.instructions[sent], target.plan.instructions[received]
    assert isinstance(send, Send)
    if (send.step, send.slice) != (receive.step, receive.slice):
        raise PlanError(f"rank {edge[0]}'s {send} meets rank {edge[1]}'s {receive}")
    target.arrive(received, source.read(send.source))
    source.complete.add(sent)


def _check_results(schedule: Schedule, ranks: list[_Rank], terms: Terms, *, divides: bool) -> None:
    wanted = _expected(schedule, terms)
    divides = divides and schedule.collective in ("all_reduce", "reduce", "reduce_scatter") and schedule.world_size > 1
    for rank in ranks:
        for chunk in schedule.result_chunks(rank.plan.rank):
            start, stop = schedule.chunk_span(chunk, rank.plan.numel, rank.plan.itemsize)
            term = wanted[rank.plan.rank, chunk]
            if divides:
                term = terms.fold([term])
            for element in range(start, stop):
                held = rank.memory[DATA][element]
                if held != term:
                    text = "nothing" if held == _POISON else terms.text(held)
                    where = f"rank {rank.plan.rank}, element {element} (chunk {chunk})"
                    raise PlanError(f"{where} ends as {text}, the schedule says {terms.text(term)}")


def _expected(schedule: Schedule, terms: Terms) -> dict[tuple[int, int], int]:
    proof = schedule.verify()
    return {place: proof.term_in(terms, *place) for place in proof.places()}


def _check_weights(ranks: list[_Rank], *, weighed: bool) -> None:
    for rank in ranks:
        folds = [each for each in rank.plan.instructions if isinstance(each, (Combine, RecvCombine))]
        if any((each.weights is not None) is not weighed for each in folds):
            raise PlanError(f"rank {rank.plan.rank}: {'a fold has no' if weighed else 'a fold has'} weights")
        for stated, held in rank.weighed:
            if stated != held:
                raise PlanError(f"rank {rank.plan.rank} weighs its operands {stated}; they cover {held} ranks")

"""Proves a schedule by running all its ranks on symbols.

Every rank's steps are played under rendezvous (unbuffered) semantics: a step's transfers are in flight together, a
transfer completes when both ends are posted, a step when all its transfers are. What each value holds is tracked as
a term, so that the proof covers contributions (each exactly once), the order of combination, matched transfers and
freedom from deadlock. Matching is the same in every interleaving, since each step waits for all of its transfers.

The idea of checking collectives symbolically is in M. Cowan et al., "MSCCLang: Microsoft Collective Communication
Language" (ASPLOS 2023); order of combination and rendezvous progress are checked here besides.

Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from microddp.errors import ScheduleError
from microddp.schedule.ir import OWN, Fold, Recv, Send, Step, num_ranks
from microddp.schedule.terms import Overlap, Terms, ranks_of

if TYPE_CHECKING:
    from microddp.schedule.schedule import Schedule

__all__ = ["Proof", "verify"]


@dataclass(frozen=True)
class Proof:
    """What was established about a schedule.

    Attributes:
        algorithm, collective, world_size: of the schedule.
        num_steps: steps of the longest rank.
        num_messages: messages over all ranks, before slicing.
        same_bits: every rank that ends with a chunk holds the same term, so the same bits, in any arithmetic.
        rank_order: every result is the left fold ((x0∘x1)∘x2)∘… .
        results: (rank, chunk) -> the term each rank ends with, as text.
    """

    algorithm: str
    collective: str
    world_size: int
    num_steps: int
    num_messages: int
    same_bits: bool
    rank_order: bool
    _terms: Terms = field(repr=False)
    _results: dict[tuple[int, int], int] = field(repr=False)

    def order(self, chunk: int, rank: int = 0) -> str:
        """How the result in ``chunk`` on ``rank`` was combined: ``((x1∘x2)∘x0)``."""
        return self._terms.text(self._results[rank, chunk])

    def places(self) -> tuple[tuple[int, int], ...]:
        """Every (rank, chunk) that holds a result."""
        return tuple(self._results)

    def term_in(self, terms: Terms, rank: int, chunk: int) -> int:
        """The result of ``chunk`` on ``rank`` as a term of another table."""
        return self._terms.rebuild(self._results[rank, chunk], terms)


@dataclass
class _Rank:
    rank: int
    steps: Iterator[Step]
    own: dict[int, int]
    staged: dict[tuple[int, int], int] = field(default_factory=dict)
    ever_staged: dict[int, set[int]] = field(default_factory=dict)
    unused: set[tuple[int, int]] = field(default_factory=set)
    number: int = -1
    step: Step | None = None
    pending: int = 0
    arrivals: list[tuple[Recv, int]] = field(default_factory=list)


def verify(schedule: Schedule) -> Proof:
    """Proves ``schedule``, or raises ScheduleError saying which rank, step, chunk and why."""
    return _Verifier(schedule).run()


class _Verifier:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.terms = Terms()
        self.ranks = [
            _Rank(rank, schedule.steps(rank), self._initial(rank), number=-1) for rank in range(schedule.world_size)
        ]
        # (source, target) -> what waits for its other end, with the number of the step it stands in.
        self.sends: dict[tuple[int, int], deque[tuple[Send, int, int]]] = {}
        self.receives: dict[tuple[int, int], deque[tuple[Recv, int]]] = {}
        self.num_messages = 0

    def run(self) -> Proof:
        ready = deque(self.ranks)
        while ready:
            actor = ready.popleft()
            if self._next_step(actor):
                ready.extend(self._post(actor))
        stuck = [actor for actor in self.ranks if actor.step is not None]
        if stuck:
            raise ScheduleError(f"{self._title()}: deadlock: {'; '.join(self._waits_for(each) for each in stuck[:6])}")
        return self._conclude()

    def _initial(self, rank: int) -> dict[int, int]:
        schedule = self.schedule
        if schedule.collective == "broadcast" and rank != schedule.root:
            return {}
        chunks = [rank] if schedule.collective == "all_gather" else range(schedule.num_chunks)
        return {chunk: self.terms.leaf(rank) for chunk in chunks}

    def _next_step(self, actor: _Rank) -> bool:
        actor.step = next(actor.steps, None)
        actor.number += 1
        if actor.step is None:
            if actor.unused:
                chunk, key = min(actor.unused)
                raise self._error(actor, f"chunk {chunk} staged under key {key} is never folded or forwarded")
            return False
        for keep in actor.step.keeps:
            self._stage(actor, keep.chunk, keep.key, self._value(actor, keep.chunk, OWN))
        return True

    def _post(self, actor: _Rank) -> list[_Rank]:
        """Posts the step's transfers; returns the ranks that can go on."""
        assert actor.step is not None
        actor.pending, actor.arrivals = len(actor.step.transfers), []
        self._check_overwrites(actor, actor.step)
        touched = set()
        for each in actor.step.transfers:
            self._check_transfer(actor, each)
            if isinstance(each, Send):
                edge = (actor.rank, each.peer)
                term = self._value(actor, each.chunk, each.key)
                self.sends.setdefault(edge, deque()).append((each, term, actor.number))
            else:
                edge = (each.peer, actor.rank)
                self.receives.setdefault(edge, deque()).append((each, actor.number))
            touched.add(edge)
        done = [actor] if not actor.pending else []
        for edge in touched:
            done += self._match(edge)
        for each_done in done:
            self._complete(each_done)
        return done

    def _match(self, edge: tuple[int, int]) -> list[_Rank]:
        sends, receives = self.sends.setdefault(edge, deque()), self.receives.setdefault(edge, deque())
        done = []
        while sends and receives:
            (send, term, sent_in), (receive, received_in) = sends.popleft(), receives.popleft()
            source, target = (self.ranks[each] for each in edge)
            if sent_in != received_in:
                text = f"receives what rank {edge[0]} sends in step {sent_in}; both ends belong in the same step"
                raise self._error(target, f"{text} (an empty Step waits one out)")
            if send.chunk != receive.chunk:
                text = f"rank {edge[0]} sends chunk {send.chunk} where rank {edge[1]} expects chunk {receive.chunk}"
                raise self._error(target, text)
            target.arrivals.append((receive, term))
            self.num_messages += 1
            for end in (source, target):
                end.pending -= 1
                if not end.pending:
                    done.append(end)
        return done

    def _complete(self, actor: _Rank) -> None:
        assert actor.step is not None
        for receive, term in actor.arrivals:
            self._receive(actor, receive, term)
        for fold in actor.step.folds:
            self._fold(actor, fold)

    def _receive(self, actor: _Rank, receive: Recv, term: int) -> None:
        declared = self._declared(actor, receive)
        arriving, chunk = self.terms.mask(term), receive.chunk
        if declared != arriving:
            text = f"chunk {chunk} from rank {receive.peer} carries {ranks_of(arriving)}, declared {ranks_of(declared)}"
            raise self._error(actor, text)
        held = actor.own.get(chunk)
        if term in actor.ever_staged.get(chunk, ()) or (
            held is not None and arriving | self.terms.mask(held) == self.terms.mask(held)
        ):
            raise self._error(actor, f"chunk {chunk} from rank {receive.peer} delivers what is held already")
        if receive.key == OWN:
            actor.own[chunk] = term
        else:
            self._stage(actor, chunk, receive.key, term)

    def _declared(self, actor: _Rank, receive: Recv) -> int:
        """The mask of ``carries``, which must name ranks that exist, each once: means are weighted by their number."""
        mask = 0
        for part in receive.carries:
            if part and not 0 <= min(part) <= max(part) < self.schedule.world_size:
                raise self._error(actor, f"{receive} carries ranks that are not among {self.schedule.world_size}")
            contiguous = ((1 << len(part)) - 1) << part.start if part else 0
            mask |= contiguous if part.step == 1 else sum(1 << rank for rank in part)
        if bin(mask).count("1") != num_ranks(receive.carries):
            raise self._error(actor, f"{receive} names a rank twice among what it carries")
        return mask

    def _stage(self, actor: _Rank, chunk: int, key: int, term: int) -> None:
        if key < 0 or (chunk, key) in actor.staged:
            raise self._error(actor, f"chunk {chunk} cannot be staged under key {key}: keys are >= 0 and used once")
        actor.staged[chunk, key] = term
        actor.ever_staged.setdefault(chunk, set()).add(term)
        actor.unused.add((chunk, key))

    def _fold(self, actor: _Rank, fold: Fold) -> None:
        if len(fold.operands) < 2:
            raise self._error(actor, f"a fold of chunk {fold.chunk} needs two operands, has {len(fold.operands)}")
        values = [self._value(actor, fold.chunk, key) for key in fold.operands]
        try:
            actor.own[fold.chunk] = self.terms.fold(values)
        except Overlap as overlap:
            text = f"chunk {fold.chunk} would count the contributions of ranks {overlap.ranks} twice"
            raise self._error(actor, text) from None

    def _value(self, actor: _Rank, chunk: int, key: int) -> int:
        value = actor.own.get(chunk) if key == OWN else actor.staged.get((chunk, key))
        if value is None:
            which = "own copy" if key == OWN else f"key {key}"
            raise self._error(actor, f"chunk {chunk} is used ({which}) but not held")
        actor.unused.discard((chunk, key))
        return value

    def _check_transfer(self, actor: _Rank, each: Send | Recv) -> None:
        if not 0 <= each.peer < self.schedule.world_size or each.peer == actor.rank:
            raise self._error(actor, f"peer {each.peer} is not another rank of {self.schedule.world_size}")
        if not 0 <= each.chunk < self.schedule.num_chunks:
            raise self._error(actor, f"chunk {each.chunk} is not one of {self.schedule.num_chunks}")

    def _check_overwrites(self, actor: _Rank, step: Step) -> None:
        sent = {each.chunk for each in step.sends if each.key == OWN}
        replaced = [each.chunk for each in step.receives if each.key == OWN]
        for chunk in replaced:
            if chunk in sent or replaced.count(chunk) > 1:
                text = f"chunk {chunk} is overwritten by a receive while in use in the same step; stage it under a key"
                raise self._error(actor, text)

    def _waits_for(self, actor: _Rank) -> str:
        assert actor.step is not None
        waits = []
        for (source, target), sends in self.sends.items():
            if source == actor.rank:
                waits += [f"send of chunk {send.chunk} to rank {target}" for send, _, _ in sends]
        for (source, target), receives in self.receives.items():
            if target == actor.rank:
                waits += [f"receive of chunk {receive.chunk} from rank {source}" for receive, _ in receives]
        return f"rank {actor.rank} waits in step {actor.number} for {', '.join(waits)}"

    def _conclude(self) -> Proof:
        schedule, terms = self.schedule, self.terms
        results = {}
        for actor in self.ranks:
            for chunk in schedule.result_chunks(actor.rank):
                term, wanted = actor.own.get(chunk), self._wanted(chunk)
                held = 0 if term is None else terms.mask(term)
                if term is None or held != wanted:
                    text = f"ends with chunk {chunk} holding {ranks_of(held)}, expected {ranks_of(wanted)}"
                    raise self._error(actor, text)
                results[actor.rank, chunk] = term
        first: dict[int, int] = {}
        same_bits = all(first.setdefault(chunk, term) == term for (_, chunk), term in results.items())
        reduces = schedule.collective not in ("all_gather", "broadcast")
        distinct = set(results.values())
        rank_order = not reduces or all(terms.is_rank_order(each, schedule.world_size) for each in distinct)
        self._check_facts(same_bits, rank_order)
        num_steps = max(actor.number for actor in self.ranks)
        names = (schedule.algorithm, schedule.collective, schedule.world_size)
        return Proof(*names, num_steps, self.num_messages, same_bits, rank_order, terms, results)

    def _wanted(self, chunk: int) -> int:
        schedule = self.schedule
        if schedule.collective == "all_gather":
            return 1 << chunk
        return 1 << schedule.root if schedule.collective == "broadcast" else (1 << schedule.world_size) - 1

    def _check_facts(self, same_bits: bool, rank_order: bool) -> None:
        declared = self.schedule.entry
        if declared.same_bits and not same_bits:
            raise ScheduleError(f"{self._title()}: declared same_bits, but ranks end with different orders")
        if declared.rank_order and not rank_order:
            raise ScheduleError(f"{self._title()}: declared rank_order, but folds in another order")

    def _title(self) -> str:
        return f"{self.schedule.algorithm} over {self.schedule.world_size} ranks"

    def _error(self, actor: _Rank, text: str) -> ScheduleError:
        return ScheduleError(f"{self._title()}: rank {actor.rank}, step {actor.number}: {text}")

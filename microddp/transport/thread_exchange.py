"""One collective of one rank thread: posts transfers, moves what has met, waits for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from microddp.transport.base import Counters, Event, Exchange, Kind, Transfer
from microddp.transport.thread_call import Call, Meeting, Pair, Pending, move
from microddp.transport.thread_failure import call_text
from microddp.transport.thread_state import WorldState

__all__ = ["ThreadExchange"]


class ThreadExchange(Exchange):
    """One collective of one rank thread."""

    def __init__(self, world: WorldState, call: Call, counters: Counters) -> None:
        self._counters = counters
        self._peers = frozenset(range(len(world.ranks))) - {call.state.rank}
        self._world = world
        self._call = call
        self._steps: set[int] = set()

    def post(self, group: Sequence[Transfer]) -> Sequence[Event]:
        for transfer in group:
            if transfer.peer not in self._peers:
                raise ValueError(f"rank {self._call.state.rank} has no peer {transfer.peer}")
            if transfer.kind is Kind.RECV_COMBINE and transfer.combine is None:
                raise ValueError(f"rank {self._call.state.rank}: a {transfer.kind.value} needs a combine function")
        posted = [Pending(self._call, transfer) for transfer in group]
        self._call.posted += posted
        pairs: list[Pair] = []
        try:
            error = self._world.match(self._call, posted, pairs)
            for source, target in pairs:
                move(source, target)
                self._world.complete(source, target)
        except BaseException as raised:
            error = self._world.break_moves(self._call, pairs, raised)
        if error is not None:
            self._fail(error)
        for transfer in group:
            self._counters.count(transfer)
            self._steps.add(transfer.step)
        return posted

    def wait(self, events: Sequence[Event], queue: object = None) -> None:
        for event in events:
            if not event.done:
                self._block(event)
        if self._world.failure is not None or self._call.state.closed:
            self._refuse()

    def finish(self) -> None:
        call = self._call
        if not call.posted and not call.meeting.done:
            self._block(call.meeting)
        self.wait(call.posted)
        call.state.call = None
        self._counters.steps += len(self._steps)
        self._counters.collectives += 1

    def _block(self, awaited: Pending | Meeting) -> None:
        try:
            error = self._world.block(self._call, awaited)
        except BaseException as interrupt:  # of this thread, while it sleeps
            self._world.abort(self._call.state, interrupt)
            raise
        if error is not None:
            self._fail(error)

    def _refuse(self) -> None:
        with self._world.lock:
            error = self._world.refusal(self._call.state, f"in {call_text(self._call.header)}")
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        self._world.drain(self._call.state)
        raise error

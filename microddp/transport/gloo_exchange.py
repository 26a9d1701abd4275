"""One collective over Gloo: starts its messages, waits for them, and says what went wrong."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from microddp.errors import ClosedError
from microddp.transport.base import Exchange, Header, Kind, Transfer
from microddp.transport.gloo_group import NUM_TAGS, dissemination, header_tag
from microddp.transport.gloo_wait import wait_for_work
from microddp.transport.noticeboard import SETTLE_GRACE_S, STORE_TIMEOUT_S, Failure, connection_lost

if TYPE_CHECKING:
    from microddp.transport.gloo import GlooTransport

__all__ = ["GlooExchange", "Pending"]

LARGE_NBYTES: Final = 1 << 16  # smaller messages are written and read as a whole


class Pending:
    """One transfer that was started; ``work`` is None once it is complete (Gloo's can be awaited only once)."""

    __slots__ = ("transfer", "work")

    def __init__(self, transfer: Transfer, work: Any) -> None:
        self.transfer = transfer
        self.work = work


class GlooExchange(Exchange):
    """The transfers of one collective."""

    __slots__ = (
        "_awaited",
        "_deadline",
        "_has_large",
        "_is_large",
        "_pending",
        "_steps",
        "_tag",
        "_transport",
        "_watchdog",
        "header",
    )

    def __init__(self, transport: GlooTransport, header: Header, deadline: float) -> None:
        self.header = header
        self._transport = transport
        self._watchdog = transport.watchdog
        self._deadline = deadline
        self._tag = header_tag(header)
        self._pending: list[Pending] = []
        self._steps: set[int] = set()
        self._has_large = False  # of the transfers posted so far
        self._is_large = header.nbytes >= LARGE_NBYTES  # of the whole collective, an upper bound
        self._awaited: Transfer | None = None

    def post(self, group: Sequence[Transfer]) -> list[Pending]:
        """See ``Exchange.post``."""
        for transfer in group:
            self._check(transfer)
        events = [self._start(transfer) for transfer in group]
        count = self._transport.counters.count
        for transfer in group:
            self._has_large |= transfer.view.nbytes >= LARGE_NBYTES
            count(transfer)
            self._steps.add(transfer.step)
        self._pending += events
        return events

    def run(self, task: Callable[[], None]) -> None:
        """See ``Exchange.run``."""
        transport = self._transport
        if self._is_large and transport.world_size > 1 and not transport.waiter.is_current:
            self._raise(transport.waiter.run(task, self._deadline))
        else:
            task()

    def wait(self, events: Sequence[Pending]) -> None:
        """See ``Exchange.wait``."""
        waiting = [pending for pending in events if pending.work is not None]
        if waiting and self._has_large and not self._transport.waiter.is_current:
            self._raise(self._transport.waiter.run(partial(self._wait_here, waiting), self._deadline))
        else:
            self._wait_here(waiting)

    def _wait_here(self, waiting: Sequence[Pending]) -> None:
        watchdog = self._watchdog
        for pending in waiting:
            self._awaited = pending.transfer
            if self._has_large:  # it may be half-way through, and then Gloo does not tell of the peer's death
                watchdog.probe = {pending.transfer.peer}
            watchdog.waiting_since = time.monotonic()
            try:
                wait_for_work(pending.work, self._deadline)
            except RuntimeError as error:
                raise self._failed(pending.transfer, error) from None
            pending.work = None
        watchdog.waiting_since = None
        watchdog.probe = set()

    def _raise(self, outcome: BaseException | None) -> None:
        """Raises what ended the waiter's task; ``RuntimeError`` stands for the waiter itself being given up."""
        if type(outcome) is RuntimeError:
            raise self._failed(self._awaited, outcome)
        if outcome is not None:
            raise outcome

    def finish(self) -> None:
        """See ``Exchange.finish``."""
        transport = self._transport
        if self._pending:
            self.wait(self._pending)
        elif transport.world_size > 1:
            if math.prod(self.header.shape) == 0:
                self._barrier()
            else:
                self._meet()
        self._leave()
        transport.counters.steps += len(self._steps)
        transport.counters.collectives += 1

    def _start(self, transfer: Transfer) -> Pending:
        group = self._transport.group
        if group is None or self._transport.failure is not None:
            raise self._failed(transfer, None)
        start = group.send if transfer.kind is Kind.SEND else group.recv
        view = transfer.view
        # The size is part of the tag: were plans to disagree under one header, they would get stuck, not abort.
        tag = (self._tag + view.nbytes) % NUM_TAGS
        try:
            return Pending(transfer, start([view], transfer.peer, tag))
        except RuntimeError as error:
            raise self._failed(transfer, error) from None

    def _check(self, transfer: Transfer) -> None:
        peer, transport = transfer.peer, self._transport
        if not 0 <= peer < transport.world_size or peer == transport.rank:
            raise ValueError(f"rank {transport.rank} of {transport.world_size} cannot exchange data with rank {peer}")
        if transfer.kind is Kind.RECV_COMBINE:
            raise ValueError("the gloo transport cannot combine what it receives: lower the plan without fusing")

    def _barrier(self) -> None:
        """All ranks have no elements: they wait for each other."""
        transport = self._transport
        for step, (to_rank, from_rank) in enumerate(dissemination(transport.rank, transport.world_size)):
            token, received = torch.zeros(2, dtype=torch.uint8).split(1)
            send, recv = Transfer(Kind.SEND, to_rank, step, token), Transfer(Kind.RECV, from_rank, step, received)
            self.wait([self._start(send), self._start(recv)])

    def _meet(self) -> None:
        """This rank has nothing to do, others may: waits until all have entered, by the store."""
        watchdog = self._watchdog
        watchdog.meeting = met = threading.Event()
        watchdog.waiting_since = now = time.monotonic()
        in_time = met.wait(max(self._deadline - now, 0.0))
        watchdog.meeting = None
        if not in_time or self._transport.failure is not None:
            raise self._failed(None, None)

    def _leave(self) -> None:
        self._watchdog.end()
        self._transport.open_exchange = None
        self._pending = []

    def _failed(self, transfer: Transfer | None, error: RuntimeError | None) -> Exception:
        """The error to raise after Gloo's ``error``; breaks the transport on all ranks."""
        transport, header = self._transport, self.header
        context = f"rank {transport.rank} of {transport.world_size}: {self._describe(transfer)}"
        if transport.closed:
            self._leave()
            return ClosedError(f"{context}: the transport was closed meanwhile")
        peer = transfer.peer if transfer else None
        if time.monotonic() >= self._deadline or "Timed out" in str(error):
            absent = transport.watchdog.call(lambda board: board.describe_absent(header.sequence), STORE_TIMEOUT_S)
            text = f"the deadline passed on rank {transport.rank}{absent or ''}"
            failure = transport.settle(Failure("timeout", transport.rank, text), peer, 0.0)
        else:
            failure = transport.settle(connection_lost(transport.rank, peer), peer, SETTLE_GRACE_S)
        self._leave()
        return failure.exception(context)

    def _describe(self, transfer: Transfer | None) -> str:
        header = self.header
        text = f"{header.collective} by {header.algorithm}, collective {header.sequence}"
        if transfer is None:
            return f"{text}, waiting for all ranks to enter it"
        verb = "sending to" if transfer.kind is Kind.SEND else "receiving from"
        return f"{text}, step {transfer.step}, {verb} rank {transfer.peer}"

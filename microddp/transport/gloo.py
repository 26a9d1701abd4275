"""Messages between processes over torch.distributed's Gloo point-to-point calls.

Gloo aborts the process when a message is longer than its receive, and knows nothing of collectives. So all messages
of a collective carry its header, hashed, as their tag: ranks that disagree never match, get stuck, and their
watchdogs find out why (see ``watchdog``).
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from microddp.errors import ClosedError, TransportError
from microddp.transport.base import Exchange, Header, Kind, Transfer, Transport
from microddp.transport.gloo_group import MIN_WAIT, NUM_TAGS, clone, close_connections, connect, header_tag
from microddp.transport.noticeboard import Failure, Noticeboard, Status
from microddp.transport.watchdog import Watchdog

__all__ = ["GlooTransport"]

SETTLE_GRACE_S: Final = 0.5  # a rank that ends its connections says why first; one that died never does
STORE_TIMEOUT_S: Final = 1.0


class GlooTransport(Transport):
    """One rank's connections to all others, and a store beside them for what cannot travel there."""

    name = "gloo"

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        watchdog_period: float = 0.5,
        address: str | None = None,
    ) -> None:
        """Connects to all other ranks.

        Args:
            store: a torch.distributed store that all ranks reach, under a prefix that only this transport uses.
            timeout: how long to wait for the other ranks here, in seconds.
            watchdog_period: after how many seconds in one wait the ranks' headers are compared.
            address: the local address to listen on; None: the interface that GLOO_SOCKET_IFNAME names, else
                torch's choice.

        Raises:
            ValueError: ``rank`` or ``world_size`` make no sense.
            TransportError: some rank did not come in time.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0..{world_size - 1} (world size {world_size})")
        super().__init__(rank, world_size)
        self._failure: Failure | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._open_exchange: GlooExchange | None = None
        self._group: Any = None
        # A connection of its own: a store's calls wait for each other, and others may wait in theirs for long.
        self._watchdog = Watchdog(Noticeboard(clone(store), rank, world_size), watchdog_period, self._stop_waits)
        if world_size > 1:
            self._group = connect(store, rank, world_size, timeout, address)
        atexit.register(self.close)

    def open(self, header: Header, deadline: float) -> GlooExchange:
        """See ``Transport.open``. A failure on another rank is seen at the first transfer or wait."""
        self._check_usable()
        if self._open_exchange is not None:
            raise TransportError(
                f"rank {self.rank}: collective {header.sequence} was begun before "
                f"{self._open_exchange.header.sequence} was finished"
            )
        self._open_exchange = exchange = GlooExchange(self, header, deadline)
        if self.world_size > 1:
            self._watchdog.begin(header)
        return exchange

    def reject(self, sequence: int, error: BaseException) -> None:
        """See ``Transport.reject``. Ranks that have entered the collective notice within the watchdog's tick."""
        if self.world_size == 1 or self._closed or self._failure is not None:
            return
        text = f"rank {self.rank} refused collective {sequence}: {type(error).__name__}: {error}"
        failure = Failure("remote", self.rank, text)
        self._watchdog.last_sequence = max(self._watchdog.last_sequence, sequence)
        self._watchdog.call(lambda board: board.reject(sequence, failure), STORE_TIMEOUT_S)

    def abort(self, error: BaseException) -> None:
        """See ``Transport.abort``."""
        if self._closed or self._failure is not None:
            return
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        text = f"rank {self.rank} raised {type(error).__name__}: {error}\n{trace}"
        self.settle(Failure("remote", self.rank, text), None, 0.0)

    def close(self) -> None:
        """See ``Transport.close``. What was sent still arrives: the connections end after their last byte."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        if self.world_size > 1:
            status = Status(self._watchdog.last_sequence, None, closed=True)
            self._watchdog.call(lambda board: board.set_status(status), STORE_TIMEOUT_S)
        if self._open_exchange is not None:
            self._stop_waits(Failure("closed", self.rank, f"rank {self.rank} closed its transport"))
        self._group = None
        self._watchdog.stop(STORE_TIMEOUT_S)

    def settle(self, suspicion: Failure, peer: int | None, grace_s: float) -> Failure:
        """Breaks this transport and its peers' for the reason that all ranks agree on, and returns that reason."""
        if self._failure is None:
            agreed = suspicion
            if self.world_size > 1:
                found = self._watchdog.call(lambda board: board.settle(suspicion, peer, grace_s), grace_s + 1.0)
                agreed = found or suspicion
            self._stop_waits(agreed)
        assert self._failure is not None
        return self._failure

    def _stop_waits(self, failure: Failure) -> None:
        """Remembers why, then closes all connections of this rank: every wait of it ends, then those of its peers."""
        if self._failure is None:
            self._failure = failure
        meeting = self._watchdog.meeting
        if meeting is not None:
            meeting.set()
        group = self._group
        if group is not None:
            close_connections(group, self.rank, self.world_size)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"rank {self.rank}: the transport was closed")
        if self._failure is not None:
            raise self._failure.closed_error(self.rank)


class _Pending:
    """One transfer that was started; ``work`` is None once it is complete (Gloo's can be awaited only once)."""

    __slots__ = ("transfer", "work")

    def __init__(self, transfer: Transfer, work: Any) -> None:
        self.transfer = transfer
        self.work = work


class GlooExchange(Exchange):
    """The transfers of one collective."""

    __slots__ = ("_deadline", "_pending", "_steps", "_tag", "_transport", "_watchdog", "header")

    def __init__(self, transport: GlooTransport, header: Header, deadline: float) -> None:
        self.header = header
        self._transport = transport
        self._watchdog = transport._watchdog
        self._deadline = deadline
        self._tag = header_tag(header)
        self._pending: list[_Pending] = []
        self._steps: set[int] = set()

    def post(self, group: Sequence[Transfer], after: Sequence[Any] = ()) -> list[_Pending]:
        """See ``Exchange.post``."""
        for transfer in group:
            self._check(transfer)
        events = [self._start(transfer) for transfer in group]
        count = self._transport.counters.count
        for transfer in group:
            count(transfer)
            self._steps.add(transfer.step)
        self._pending += events
        return events

    def wait(self, events: Sequence[_Pending], queue: Any = None) -> None:
        """See ``Exchange.wait``."""
        watchdog = self._watchdog
        for pending in events:
            if pending.work is None:
                continue
            watchdog.waiting_since = now = time.monotonic()
            try:
                pending.work.wait(max(timedelta(seconds=self._deadline - now), MIN_WAIT))
            except RuntimeError as error:
                raise self._failed(pending.transfer, error) from None
            pending.work = None
        watchdog.waiting_since = None

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

    def _start(self, transfer: Transfer) -> _Pending:
        group = self._transport._group
        if group is None or self._transport._failure is not None:
            raise self._failed(transfer, None)
        start = group.send if transfer.kind is Kind.SEND else group.recv
        view = transfer.view
        # The size is part of the tag: were plans to disagree under one header, they would get stuck, not abort.
        tag = (self._tag + view.nbytes) % NUM_TAGS
        try:
            return _Pending(transfer, start([view], transfer.peer, tag))
        except RuntimeError as error:
            raise self._failed(transfer, error) from None

    def _check(self, transfer: Transfer) -> None:
        peer, transport = transfer.peer, self._transport
        if not 0 <= peer < transport.world_size or peer == transport.rank:
            raise ValueError(f"rank {transport.rank} of {transport.world_size} cannot exchange data with rank {peer}")
        if transfer.kind is Kind.RECV_COMBINE:
            raise ValueError("the gloo transport cannot combine what it receives: lower the plan without fusing")

    def _barrier(self) -> None:
        """All ranks have no elements: in round k each hears from the rank 2^k before it (dissemination barrier)."""
        rank, world_size = self._transport.rank, self._transport.world_size
        for step in range((world_size - 1).bit_length()):
            token, received = torch.zeros(2, dtype=torch.uint8).split(1)
            send = Transfer(Kind.SEND, (rank + 2**step) % world_size, step, token)
            recv = Transfer(Kind.RECV, (rank - 2**step) % world_size, step, received)
            self.wait([self._start(send), self._start(recv)])

    def _meet(self) -> None:
        """This rank has nothing to do, others may: waits until all have entered, by the store."""
        watchdog = self._watchdog
        watchdog.meeting = met = threading.Event()
        watchdog.waiting_since = now = time.monotonic()
        in_time = met.wait(max(self._deadline - now, 0.0))
        watchdog.meeting = None
        if not in_time or self._transport._failure is not None:
            raise self._failed(None, None)

    def _leave(self) -> None:
        self._watchdog.end()
        self._transport._open_exchange = None
        self._pending = []

    def _failed(self, transfer: Transfer | None, error: RuntimeError | None) -> Exception:
        """The error to raise after Gloo's ``error``; breaks the transport on all ranks."""
        transport, header = self._transport, self.header
        context = f"rank {transport.rank} of {transport.world_size}: {self._describe(transfer)}"
        if transport._closed:
            self._leave()
            return ClosedError(f"{context}: the transport was closed meanwhile")
        peer = transfer.peer if transfer else None
        if time.monotonic() >= self._deadline or "Timed out" in str(error):
            absent = transport._watchdog.call(lambda board: board.describe_absent(header.sequence), STORE_TIMEOUT_S)
            text = f"the deadline passed on rank {transport.rank}{absent or ''}"
            failure = transport.settle(Failure("timeout", transport.rank, text), peer, 0.0)
        else:
            text = f"rank {transport.rank} lost its connection to rank {peer}, which exited, was killed or failed"
            failure = transport.settle(Failure("lost", transport.rank, text), peer, SETTLE_GRACE_S)
        self._leave()
        return failure.exception(context)

    def _describe(self, transfer: Transfer | None) -> str:
        header = self.header
        text = f"{header.collective} by {header.algorithm}, collective {header.sequence}"
        if transfer is None:
            return f"{text}, waiting for all ranks to enter it"
        verb = "sending to" if transfer.kind is Kind.SEND else "receiving from"
        return f"{text}, step {transfer.step}, {verb} rank {transfer.peer}"

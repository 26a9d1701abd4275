"""Messages between processes over torch.distributed's Gloo point-to-point calls.

Gloo aborts the process when a message is longer than its receive, and knows nothing of collectives. So all messages
of a collective carry its header, hashed, as their tag: ranks that disagree never match, get stuck, and their
watchdogs find out why (see ``watchdog``).
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from typing import Any

from microddp.errors import ClosedError, TransportError
from microddp.transport.base import Header, Transport
from microddp.transport.bounded import CONNECT_GRACE_S, BoundedStore, run_bounded
from microddp.transport.gloo_exchange import GlooExchange
from microddp.transport.gloo_group import clone, close_connections, connect, is_connected
from microddp.transport.gloo_wait import Waiter
from microddp.transport.noticeboard import STORE_TIMEOUT_S, Failure, Noticeboard, Status
from microddp.transport.watchdog import Watchdog

__all__ = ["GlooTransport"]


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
        self.failure: Failure | None = None
        self.closed = False
        self._lock = threading.Lock()
        self.open_exchange: GlooExchange | None = None
        self.group: Any = None
        deadline, who = time.monotonic() + timeout, f"rank {rank} of {world_size}"
        # A connection of its own: a store's calls wait for each other, and others may wait in theirs for long.
        own_store = BoundedStore(store, deadline, who).call(lambda: clone(store))
        self.watchdog = Watchdog(
            Noticeboard(own_store, rank, world_size), watchdog_period, self._is_connected, self._stop_waits
        )
        self.waiter = Waiter(f"microddp-waiter-{rank}")
        if world_size > 1:
            what = f"{who}, connecting to the other ranks by the store, whose host may be stopped"
            self.group = run_bounded(
                lambda: connect(store, rank, world_size, timeout, address), deadline + CONNECT_GRACE_S, what
            )
        atexit.register(self.close)

    def open(self, header: Header, deadline: float) -> GlooExchange:
        """See ``Transport.open``. A failure on another rank is seen at the first transfer or wait."""
        self._check_usable()
        if self.open_exchange is not None:
            raise TransportError(
                f"rank {self.rank}: collective {header.sequence} was begun before "
                f"{self.open_exchange.header.sequence} was finished"
            )
        self.open_exchange = exchange = GlooExchange(self, header, deadline)
        if self.world_size > 1:
            self.watchdog.begin(header)
        return exchange

    def reject(self, sequence: int, error: BaseException) -> None:
        """See ``Transport.reject``. Ranks that have entered the collective notice within the watchdog's tick."""
        if self.world_size == 1 or self.closed or self.failure is not None:
            return
        text = f"rank {self.rank} refused collective {sequence}: {type(error).__name__}: {error}"
        failure = Failure("remote", self.rank, text)
        self.watchdog.last_sequence = max(self.watchdog.last_sequence, sequence)
        self.watchdog.call(lambda board: board.reject(sequence, failure), STORE_TIMEOUT_S)

    def abort(self, error: BaseException) -> None:
        """See ``Transport.abort``."""
        if self.closed or self.failure is not None:
            return
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        text = f"rank {self.rank} raised {type(error).__name__}: {error}\n{trace}"
        self.settle(Failure("remote", self.rank, text), None, 0.0)

    def close(self) -> None:
        """See ``Transport.close``. What was sent still arrives: the connections end after their last byte."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        atexit.unregister(self.close)
        if self.world_size > 1:
            status = Status(self.watchdog.last_sequence, None, closed=True)
            self.watchdog.call(lambda board: board.set_status(status), STORE_TIMEOUT_S)
        if self.open_exchange is not None:
            self._stop_waits(Failure("closed", self.rank, f"rank {self.rank} closed its transport"))
        self.group = None
        self.watchdog.stop(STORE_TIMEOUT_S)
        self.waiter.stop(0.0 if self.failure is not None else STORE_TIMEOUT_S)

    def settle(self, suspicion: Failure, peer: int | None, grace_s: float) -> Failure:
        """Breaks this transport and its peers' for the reason that all ranks agree on, and returns that reason."""
        if self.failure is None:
            agreed = suspicion
            if self.world_size > 1:
                found = self.watchdog.call(lambda board: board.settle(suspicion, peer, grace_s), grace_s + 1.0)
                agreed = found or suspicion
            self._stop_waits(agreed)
        assert self.failure is not None
        return self.failure

    def _stop_waits(self, failure: Failure) -> None:
        """Remembers why, then closes all connections of this rank: every wait of it ends, then those of its peers."""
        if self.failure is None:
            self.failure = failure
        meeting = self.watchdog.meeting
        if meeting is not None:
            meeting.set()
        self.waiter.interrupt()
        group = self.group
        if group is not None:
            close_connections(group, self.rank, self.world_size)

    def _is_connected(self, peer: int) -> bool:
        group = self.group
        return group is None or is_connected(group, peer)

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedError(f"rank {self.rank}: the transport was closed")
        if self.failure is not None:
            raise self.failure.closed_error(self.rank)

"""The threads beside a stream-ordered transport: they notice that a collective fails, and end it on every rank.

The watchdog polls the device: which collectives have ended, whether NCCL reports an error, whether a deadline has
passed. It never waits for the store; a second thread talks to that: it answers other ranks, compares headers, and sees
failures that they publish. A third, the lifeline's, hears of ranks that die. Whoever learns of a failure first, the
watchdog then aborts the communicator, which ends what the device is doing.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from microddp.transport.base import Header
from microddp.transport.nccl_api import describe_nccl_error
from microddp.transport.nccl_exchange import Flight
from microddp.transport.noticeboard import Failure
from microddp.transport.store_thread import StoreThread
from microddp.transport.stream_reports import DESCRIBE_S, SILENT_STORE, StreamReports

if TYPE_CHECKING:
    from microddp.transport.nccl import NcclTransport

__all__ = ["StreamWatchdog"]

_BUSY_S: Final = 0.02
_IDLE_S: Final = 1.0
_ENQUEUE_GRACE_S: Final = 3.0
"""How long after its deadline a collective may still be connecting, or meeting the others: they have deadlines of their
own, and say more."""

_REMOTE_ERROR: Final = 6
_CAUSE_GRACE_S, _EFFECT_GRACE_S = 0.4, 0.7
"""How long an error of NCCL waits for a better explanation: of a rank whose collective does not fit, or, longer, where
the error only says that a peer is gone, of the rank that caused that."""

_log = logging.getLogger("microddp")


class StreamWatchdog:
    """Watches the collectives of one rank that are enqueued and have not ended.

    Attributes:
        reports: what goes through the store.
    """

    def __init__(self, transport: NcclTransport, reports: StreamReports) -> None:
        self.reports = reports
        self._transport = transport
        self._flights: list[Flight] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._is_aborting, self._aborted = False, threading.Event()
        self._failed: list[Flight] = []
        self._thread: threading.Thread | None = None
        name = f"microddp-store-{transport.rank}"
        self.store = StoreThread(name, self._tick_store, self._store_is_gone)

    def add(self, flight: Flight) -> None:
        """Watches ``flight`` until it ends."""
        with self._lock:
            self._flights.append(flight)
            is_first = len(self._flights) == 1
        self.start()
        if is_first:
            self._wake.set()

    def start(self) -> None:
        """Watches the collective that is being enqueued, too: loading a kernel waits for the device, and so does what
        finds the device's queue full; if a peer does not come, for ever."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._stopping:
                name = f"microddp-watchdog-{self._transport.rank}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def oldest(self) -> Flight | None:
        """The first collective that has not ended."""
        with self._lock:
            return self._flights[0] if self._flights else None

    def pending(self) -> list[Flight]:
        """All that have not ended, in order."""
        with self._lock:
            return [each for each in self._flights if not each.done()]

    def unfinished(self) -> list[Flight]:
        """All that have not ended well as far as is known, in order: those that failed too."""
        with self._lock:
            return [each for each in (*self._failed, *self._flights) if not each.ended_well]

    def wait_for_abort(self, timeout: float) -> None:
        """After a failure: waits until the device has stopped, at most ``timeout`` seconds."""
        self._aborted.wait(timeout)

    def wake(self) -> None:
        """Something has failed: look at once."""
        self._wake.set()
        if self._thread is None:
            self._abort()

    def stop(self, timeout: float) -> None:
        """Ends both threads."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        self.store.stop(timeout)

    def _run(self) -> None:
        self._transport.runtime.watch()
        while not self._stopping:
            busy = self.oldest() is not None
            self._wake.wait(_BUSY_S if busy else _IDLE_S)
            self._wake.clear()
            if self._transport.failure is not None:
                self._abort()
            elif not self._stopping:
                self._look()

    def _look(self) -> None:
        transport = self._transport
        flight: Flight | None = None
        try:
            with self._lock:
                for flight in self._flights:
                    flight.poll()
                self._flights = [each for each in self._flights if not each.ended_well]
            flight = self.oldest()
            if flight is None:
                self._look_at_caller()
                return
            transport.check_device()
        except Exception as error:
            text = describe_nccl_error(error) or f"{type(error).__name__}: {error}"
            what = f"{flight.describe()}: {text}" if flight is not None else f"rank {transport.rank}: {text}"
            if flight is not None:
                self._alarm(flight)
            is_effect = getattr(error, "status", None) == _REMOTE_ERROR
            self._settle(Failure("lost", transport.rank, what), _EFFECT_GRACE_S if is_effect else _CAUSE_GRACE_S)
            return
        if time.monotonic() >= flight.deadline:
            self._time_out(flight)

    def _look_at_caller(self) -> None:
        """Times out a collective whose caller has been held up on the host, enqueueing it."""
        exchange = self._transport.open_exchange
        if exchange is None or time.monotonic() < exchange.deadline + _ENQUEUE_GRACE_S:
            return
        rank = self._transport.rank
        missing = self.describe_missing(exchange.header)
        text = f"the deadline passed on rank {rank}, which has not enqueued all of it{missing}"
        self._settle(Failure("timeout", rank, text), 0.0)

    def _alarm(self, flight: Flight) -> None:
        """Has the headers compared at once."""
        self.reports.is_alarmed = True
        self.store.tell(lambda: self.reports.tick([flight]))

    def describe_missing(self, header: Header) -> str:
        """Who is missing in a collective, as the end of a sentence. Takes most of a second."""
        found: str | None = self.store.call(lambda: self.reports.describe_missing(header), DESCRIBE_S)
        return SILENT_STORE if found is None else found

    def _time_out(self, flight: Flight) -> None:
        """Says who is missing: what the ranks have published, and who does not publish anything any more."""
        rank = self._transport.rank
        missing = self.describe_missing(flight.header)
        text = f"the deadline passed on rank {rank} ({flight.describe()}){missing}"
        self._settle(Failure("timeout", rank, text), 0.0)

    def _settle(self, suspicion: Failure, grace_s: float) -> None:
        """Breaks the transport on all ranks for the reason that they agree on, as far as that can be learnt."""
        transport = self._transport
        until = time.monotonic() + grace_s
        while transport.failure is None and time.monotonic() < until:
            self._wake.wait(max(until - time.monotonic(), 0.0))
            self._wake.clear()
        transport.agree(suspicion)
        self._abort()

    def _abort(self) -> None:
        """Ends what the device is doing, and lets go of everything."""
        transport = self._transport
        failure = transport.failure
        with self._lock:
            if failure is None or self._is_aborting:
                return
            self._is_aborting = True
            flights, self._flights = self._flights, []
            failed = self._failed = [each for each in flights if each.done() and not each.ended_well]
        transport.abort_communicator()
        for flight in flights:
            flight.end(well=False)
        self._aborted.set()
        if failed and failure.kind != "closed":
            _log.error("rank %d: %s failed: %s", transport.rank, name_collectives(failed), failure.text)

    def _tick_store(self) -> float:
        if self._transport.failure is not None:
            return 1.0
        failure, delay = self.reports.tick(self.unfinished())
        if failure is not None:
            self._transport.learn(self.reports.board.publish(failure))
        return delay

    def _store_is_gone(self) -> None:
        """The host of the store died. The lifeline tells of it where a rank died; this is for what it cannot see."""


def name_collectives(flights: list[Flight]) -> str:
    """ "collective 7" or "collectives 7, 8"."""
    numbers = [str(each.header.sequence) for each in flights]
    return f"collective{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"

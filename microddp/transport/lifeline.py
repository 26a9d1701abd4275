"""A ring of TCP connections beside the data, by which every rank learns at once that a peer died or failed.

NCCL does not report the death of a peer on the same host, and the store may die with its host. The kernel ends the
connections of a process however it dies, so its two neighbours notice, and tell the others both ways round:

    rank 0 ── rank 1 ── rank 2 ── … ── rank n-1 ── rank 0

The first failure that a rank learns of is the one it passes on and reports; whatever comes later is silent. So every
rank that is still linked to a neighbour of a dead or failed one is told, and none twice.

After two ranks have left in order the ring is in two parts, which hear nothing of each other any more. Each has been
told of at least one of those that left.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

from microddp.transport.lifeline_link import Link, wait_for
from microddp.transport.lifeline_setup import connect_ring
from microddp.transport.noticeboard import Failure, connection_lost

__all__ = ["Lifeline"]

LOST_GRACE_S: Final = 0.05
"""How long a lost connection waits for a better explanation that travels the other way round."""

FLUSH_S: Final = 0.2
JOIN_S: Final = 1.0
MAX_TEXT: Final = 1 << 16
"""Of a longer text the middle is left out, in characters."""


class Lifeline:
    """One rank's part of the ring. All methods may be called from any thread."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        on_failure: Callable[[Failure], None],
        on_farewell: Callable[[int], None] | None = None,
        address: str | None = None,
    ) -> None:
        """Connects this rank with both neighbours; afterwards the store is not needed any more.

        Args:
            store: a torch.distributed store under a prefix that only this communicator uses.
            timeout: how long to wait for the other ranks here, in seconds.
            on_failure: called on the lifeline's thread, at most once, with the first failure that this rank learns
                of: its own (``publish``), that of another rank, or a lost connection.
            on_farewell: called on that thread, once for each rank that closed its lifeline in order, while there is
                no failure.
            address: the local address to listen on; None: the one by which this host reaches that of the store.

        Raises:
            ValueError: ``rank`` or ``world_size`` make no sense.
            TransportError: a rank did not come in time, died, or published a failure; the text names it.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0..{world_size - 1} (world size {world_size})")
        self.rank = rank
        self.world_size = world_size
        self._on_failure = on_failure
        self._on_farewell = on_farewell
        self._pid = os.getpid()
        self._lock = threading.RLock()  # held for moments only; reentrant, for signal handlers
        self._failure: Failure | None = None
        self._reported = False
        self._departed: set[int] = set()
        self._lost_until: float | None = None  # when a lost connection will have waited for a better explanation
        self._closed = world_size == 1
        self._links: tuple[Link, ...] = ()
        if world_size > 1:
            self._links = connect_ring(store, rank, world_size, timeout, address)
            self._ear, self._bell = socket.socketpair()
            self._thread = threading.Thread(target=self._run, name=f"microddp-lifeline-{rank}", daemon=True)
            self._start()

    @property
    def departed(self) -> frozenset[int]:
        """The ranks that are known to have closed their lifelines in order."""
        return frozenset(self._departed)

    def publish(self, failure: Failure) -> None:
        """Tells all ranks, this one's ``on_failure`` included, unless there is an earlier failure. Never blocks.

        What fits into the connections, which is all unless a neighbour has been stopped for long, is sent when this
        returns: the process may exit at once.
        """
        if os.getpid() == self._pid:
            self._learn(_shorten(failure), None)

    def close(self) -> None:
        """Says goodbye, and ends the thread. Idempotent; takes over a second only if a callback does."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of the object, but no thread, and its copies of the sockets are closed
        with self._lock:
            was_closed, self._closed = self._closed, True
            if not was_closed:
                for link in self._links:
                    link.send({"farewell": self.rank})
                self._ring_bell()
        if self._links and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _learn(self, failure: Failure, source: Link | None) -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = failure
            for link in self._links:
                if link is not source:
                    link.send({"failure": asdict(failure)})
            self._ring_bell()

    def _part(self, rank: int, source: Link) -> None:
        with self._lock:
            if rank in self._departed or rank == self.rank:
                return
            self._departed.add(rank)
            for link in self._links:
                if link is not source and link.peer != rank:
                    link.send({"farewell": rank})
        if self._on_farewell is not None and self._failure is None and not self._closed:
            self._call(self._on_farewell, rank)

    def _start(self) -> None:
        try:
            self._ear.setblocking(False)
            self._bell.setblocking(False)
            self._thread.start()
        except BaseException:  # no thread could be started, or an interrupt
            self._release()
            raise

    def _run(self) -> None:
        try:
            while not self._closed:
                for link in self._links:
                    self._hear(link)
                self._settle()
                if not self._closed:
                    wait_for(self._links, [self._ear], self._patience_s())
                    self._drain_bell()
            self._flush()
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._closed = True
            for link in self._links:
                link.close()
            self._ear.close()
            self._bell.close()

    def _hear(self, link: Link) -> None:
        with self._lock:
            link.flush()
            link.read()
        while link.messages:
            message = link.messages.popleft()
            if "farewell" in message:
                self._part(message["farewell"], link)
            elif "failure" in message:
                self._learn(Failure(**message["failure"]), link)

    def _settle(self) -> None:
        """Takes a lost connection for a failure once nothing else has explained it; reports the failure once."""
        lost = [link.peer for link in self._links if link.ended and link.peer not in self._departed]
        if not lost:
            self._lost_until = None
        elif self._lost_until is None:
            self._lost_until = time.monotonic() + LOST_GRACE_S
        elif time.monotonic() >= self._lost_until:
            self._learn(connection_lost(self.rank, lost[0]), None)
        if self._failure is not None and not self._reported and not self._closed:
            self._reported = True
            self._call(self._on_failure, self._failure)

    def _patience_s(self) -> float | None:
        if self._lost_until is None or self._failure is not None:
            return None
        return max(self._lost_until - time.monotonic(), 0.0)

    def _flush(self) -> None:
        deadline = time.monotonic() + FLUSH_S
        while any(link.outbox for link in self._links) and time.monotonic() < deadline:
            wait_for(self._links, [], deadline - time.monotonic())
            with self._lock:
                for link in self._links:
                    link.flush()
                    link.read()

    def _ring_bell(self) -> None:
        try:
            self._bell.send(b"!")
        except OSError:
            return  # it rings already, or nobody is left to hear it

    def _drain_bell(self) -> None:
        try:
            self._ear.recv(1 << 10)
        except BlockingIOError:
            return

    def _call(self, callback: Callable[[Any], None], argument: Any) -> None:
        """An error in a callback is reported as one of this thread, which goes on."""
        try:
            callback(argument)
        except Exception:
            threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), self._thread]))


def _shorten(failure: Failure) -> Failure:
    text = failure.text
    if len(text) <= MAX_TEXT:
        return failure
    half = MAX_TEXT // 2
    return replace(failure, text=f"{text[:half]}\n[{len(text) - MAX_TEXT} characters left out]\n{text[-half:]}")

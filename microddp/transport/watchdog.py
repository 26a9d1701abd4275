"""The thread beside a transport whose waits cannot be interrupted: it finds out why one is stuck and ends it.

It is the only thread that talks to the store after set-up, so that a store that hangs (its host was stopped) can
hang nothing else. While a collective is open it wakes every ``tick``: it publishes where this rank is, looks for
what others have published and, once one wait has lasted a whole ``period``, compares all ranks' headers. Otherwise
it sleeps, and waking it costs the caller one queue operation.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from torch.distributed import DistNetworkError

from microddp.transport.base import Header
from microddp.transport.noticeboard import (
    SETTLE_GRACE_S,
    Failure,
    Noticeboard,
    Status,
    connection_lost,
    describe_mismatch,
)

__all__ = ["Watchdog"]

MAX_TICK_S: Final = 0.1


class Watchdog:
    """Watches the waits of one rank.

    Attributes:
        waiting_since: when the current wait began (``time.monotonic()``); None while not waiting. Written by the
            waiting thread, once for each wait.
        last_sequence: the last collective that this rank entered; -1: none yet.
        probe: the peers of which the transport is not told when they die in the current wait.
        meeting: set by an exchange that has nothing to transfer and waits for all ranks to enter its collective.
    """

    def __init__(
        self,
        board: Noticeboard,
        period: float,
        is_connected: Callable[[int], bool],
        on_failure: Callable[[Failure], None],
    ) -> None:
        """Both are called on this thread: ``on_failure`` with what broke the collective that is being waited in."""
        self._board = board
        self._period = period
        self._tick_s = min(MAX_TICK_S, period / 2)
        self._is_connected = is_connected
        self._on_failure = on_failure
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._asleep = True
        self._store_is_gone = False
        self._header: Header | None = None  # of the collective that is open
        self._latest: Header | None = None  # of the last one
        self._published = Status()
        self._incomplete_mismatch = False
        self.last_sequence = -1
        self.waiting_since: float | None = None
        self.probe: set[int] = set()
        self._next_probe = (0.0, 0.0)  # of which wait, when
        self.meeting: threading.Event | None = None

    def begin(self, header: Header) -> None:
        """The rank enters a collective."""
        self._latest = self._header = header
        self.last_sequence = header.sequence
        if self._asleep:
            self._asleep = False
            self._put(_nothing)

    def end(self) -> None:
        """The rank has left its collective."""
        self._header = None
        self.waiting_since = None

    def call(self, task: Callable[[Noticeboard], Any], timeout: float) -> Any:
        """What ``task`` returns on the watchdog's thread; None if it raised or took longer than ``timeout``."""
        if self._store_is_gone:
            return None
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(task(self._board))
            finally:
                done.set()

        self._put(run)
        return result[0] if done.wait(timeout) and result else None

    def stop(self, timeout: float) -> None:
        """Ends and joins the thread; gives up after ``timeout`` (a daemon thread that hangs in the store)."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self._tasks.put(None)
        thread.join(timeout)

    def _put(self, task: Callable[[], object]) -> None:
        if self._thread is None:
            with self._start_lock:
                if self._thread is None:
                    name = f"microddp-watchdog-{self._board.rank}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._sleep_s())
            except queue.Empty:
                task = _nothing
            if task is None:
                return
            self._guard(task)
            self._guard(self._tick)
            self._look_at_connections()

    def _guard(self, task: Callable[[], object]) -> None:
        if self._store_is_gone:
            return
        try:
            task()
        except DistNetworkError:
            # torch prints a page each time a store that is gone is asked: from now on this rank learns from its
            # connections what it can.
            self._store_is_gone = True
        except (RuntimeError, OSError):
            return  # one question that the store could not answer

    def _sleep_s(self) -> float | None:
        """How long to sleep; None: until something comes in the queue."""
        self._asleep = not self._is_busy()
        # Asked once more: a collective that began before the flag was set has not woken this thread.
        if self._asleep and not self._is_busy():
            return None
        self._asleep = False
        return self._tick_s

    def _is_busy(self) -> bool:
        unpublished = self._published.header is not self._latest and not self._store_is_gone
        return self._header is not None or unpublished

    def _tick(self) -> None:
        latest, header = self._latest, self._header
        if latest is not None and self._published.header is not latest:
            # Also of a collective that is over by now: a rank that had nothing to do in it asks who has come.
            self._published = Status(latest.sequence, latest)
            self._board.set_status(self._published)
        if header is None:
            return
        since = self.waiting_since
        if since is None:
            return
        failure = self._board.failure() or self._board.rejection(header.sequence)
        if failure is None and (self.meeting is not None or time.monotonic() - since >= self._period):
            failure = self._compare(header)
        if failure is not None:
            failure = self._board.publish(failure)
            self._on_failure(failure)

    def _look_at_connections(self) -> None:
        """Rarer the longer a wait has lasted: each look costs some bytes that live as long as the connection."""
        since, now = self.waiting_since, time.monotonic()
        if since is None or not self.probe:
            return
        last_since, due = self._next_probe
        if last_since != since:
            due = since + self._period
        if now >= due:
            for peer in sorted(self.probe):
                if not self._is_connected(peer):
                    self._on_failure(self._settle(connection_lost(self._board.rank, peer), peer))
                    return
            due = now + max(self._period, (now - since) / 10)
        self._next_probe = (since, due)

    def _settle(self, suspicion: Failure, peer: int) -> Failure:
        found = [suspicion]
        self._guard(lambda: found.append(self._board.settle(suspicion, peer, SETTLE_GRACE_S)))
        return found[-1]

    def _compare(self, header: Header) -> Failure | None:
        """Looks at where all ranks are; ends the meeting, if there is one, once all have come."""
        statuses = self._board.statuses()
        statuses[self._board.rank] = self._published
        for rank, status in enumerate(statuses):
            if status.closed and status.sequence < header.sequence:
                return Failure("closed", rank, f"rank {rank} closed its transport")
        present = {
            rank: status.header
            for rank, status in enumerate(statuses)
            if status.sequence == header.sequence and status.header is not None
        }
        text = describe_mismatch(present)
        if text is not None:
            # The others are about to come: one more tick, and the text names all of them.
            if len(present) == len(statuses) or self._incomplete_mismatch:
                return Failure("mismatch", self._board.rank, text)
            self._incomplete_mismatch = True
            return None
        meeting = self.meeting
        if meeting is not None and all(status.sequence >= header.sequence for status in statuses):
            meeting.set()
        return None


def _nothing() -> None:
    """Wakes the thread."""

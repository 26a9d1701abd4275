"""Waits for Gloo's messages on a thread of its own.

A Gloo wait for a message that is half-way through cannot be ended, by anything, before its own timeout: when a
connection breaks, Gloo wakes the waits for messages that have not begun, and forgets the one being received and
those queued in the sender. So where a message may be half-way through, this thread waits for it, and the caller waits
for this thread, which it can stop doing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from microddp.transport.gloo_group import MIN_WAIT

__all__ = ["Waiter", "wait_for_work"]


def wait_for_work(work: Any, deadline: float) -> None:
    """Waits for one of Gloo's works; RuntimeError if it failed, or ``deadline`` passed, which ends all connections."""
    work.wait(max(timedelta(seconds=deadline - time.monotonic()), MIN_WAIT))


class Waiter:
    """One such thread, started when it is first needed.

    Attributes:
        position: which of the works that were handed over last is being waited for.
    """

    def __init__(self, name: str) -> None:
        self.position = 0
        self._name = name
        self._thread: threading.Thread | None = None
        self._batches: queue.SimpleQueue[tuple[Sequence[Any], float] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

    def wait(self, works: Sequence[Any], deadline: float) -> RuntimeError | None:
        """Returns what Gloo raised, or None once all works are complete, ``interrupt`` is called or time is up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._batches.put((works, deadline))
        try:
            return self._outcomes.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return RuntimeError("Timed out")

    def interrupt(self) -> None:
        """Lets the caller of ``wait`` go on; from any thread."""
        self._outcomes.put(RuntimeError("interrupted"))

    def stop(self, timeout: float) -> None:
        """Ends and joins the thread; one that waits for a lost message ends at that message's deadline."""
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            works, deadline = batch
            del batch
            outcome: RuntimeError | None = None
            try:
                for self.position, work in enumerate(works):
                    wait_for_work(work, deadline)
            except RuntimeError as error:
                outcome = error
            del works, work  # the works own their tensors
            self._outcomes.put(outcome)

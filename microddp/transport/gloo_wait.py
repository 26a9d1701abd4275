"""Does what waits for Gloo's messages on a thread of its own.

A Gloo wait for a message that is half-way through cannot be ended, by anything, before its own timeout: when a
connection breaks, Gloo wakes the waits for messages that have not begun, and forgets the one being received and
those queued in the sender. So where a message may be half-way through, this thread waits for it, and the caller waits
for this thread, which it can stop doing. Handing over costs two wake-ups, so it is done once for a collective.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from microddp.transport.gloo_group import MIN_WAIT_S

__all__ = ["Waiter", "wait_for_work"]

GRACE_S: Final = 0.2  # the thread notices the deadline itself, and knows what it was waiting for


def wait_for_work(work: Any, deadline: float) -> None:
    """Waits for one of Gloo's works; RuntimeError if it failed, or ``deadline`` passed, which ends all connections."""
    work.wait(timedelta(0, max(deadline - time.monotonic(), MIN_WAIT_S)))


class Waiter:
    """One such thread, started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def run(self, task: Callable[[], None], deadline: float) -> BaseException | None:
        """Returns what ``task`` raised, or None once it is done; RuntimeError on ``interrupt``, or when time is up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)
        try:
            return self._outcomes.get(timeout=max(deadline - time.monotonic(), 0.0) + GRACE_S)
        except queue.Empty:
            return RuntimeError("Timed out")

    def interrupt(self) -> None:
        """Lets the caller of ``run`` go on; from any thread."""
        self._outcomes.put(RuntimeError("interrupted"))

    def stop(self, timeout: float) -> None:
        """Ends and joins the thread; one that waits for a lost message ends at that message's deadline."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            outcome: BaseException | None = None
            try:
                task()
            except BaseException as error:
                outcome = error
            del task  # it owns the tensors
            self._outcomes.put(outcome)
            del outcome

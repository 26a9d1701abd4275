"""Work in the background: one thread per communicator that runs its collectives in the order of the calls."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Work", "Worker"]

Result = TypeVar("Result")

_log = logging.getLogger("microddp")


class Work(Generic[Result]):
    """A collective that runs in the background. Its tensors must not be touched until ``wait`` returns.

    If it fails and nobody ever waits for it, the error is logged when the object goes.
    """

    def __init__(self, job: Callable[[], Result] | None, what: str) -> None:
        self._job: Callable[[], Result] | None = job
        self._what = what
        self._finished = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._was_seen = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Result:
        """Blocks until it has ended and returns the result: the tensor that the call would have returned.

        Args:
            timeout: seconds to wait here; None waits for as long as the communicator's own timeout lets it run.

        Raises:
            TimeoutError: it has not ended in time. It goes on: wait again.
            Exception: whatever made the collective fail, at every call of ``wait``.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self._what} has not ended after {timeout} s; it goes on")
        if self._error is not None:
            self._was_seen = True
            raise self._error
        return self._result  # type: ignore[return-value] # set before _finished

    def synchronize(self, timeout: float | None = None) -> Result:
        """Blocks the host until it has ended; raises like ``wait``, which on GPUs blocks only the caller's stream."""
        return self.wait(timeout)

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "pending"
        return f"<Work {self._what}: {state}>"

    def _run(self) -> None:
        job, self._job = self._job, None
        try:
            if job is not None:
                self._result = job()
        except BaseException as error:  # told to whoever waits
            self._error = error
        finally:
            self._finished.set()

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None and not self._was_seen:
            _log.error("%s failed and nobody waited for it: %s: %s", self._what, type(error).__name__, error)


class Worker:
    """One daemon thread, started at the first submission, that runs works in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: threading.Event | None = None  # not the work itself: it must go when its owner drops it

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted has ended."""
        return self._last is None or self._last.is_set()

    def submit(self, work: Work[Any]) -> None:
        """Queues a work. By one thread at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_all, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        self._last = work._finished
        self._queue.put(work)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until everything submitted so far has ended; says whether it has."""
        return self._last is None or self._last.wait(timeout)

    def stop(self, timeout: float) -> bool:
        """Ends the thread after what is queued; says whether it ended in time. Idempotent."""
        thread = self._thread
        if thread is None:
            return True
        self._queue.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()


def _run_all(works: queue.SimpleQueue[Work[Any] | None]) -> None:
    while True:
        work = works.get()
        if work is None:
            return
        work._run()
        del work  # its last reference may be here: then an error is logged now

"""The one thread of a transport that talks to its store, so that a store that hangs can hang nothing else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from torch.distributed import DistNetworkError

__all__ = ["StoreThread"]

_END: Final = object()
_LOOK_S: Final = 0.1
SILENCE_S: Final = 1.0
"""A store that has not answered a question for so long does not answer: its host is stopped, say."""


class StoreThread:
    """Runs tasks that others hand it, and one of its own again and again.

    Attributes:
        is_gone: the store's host does not answer any more; nothing is asked of it from then on.
    """

    def __init__(self, name: str, tick: Callable[[], float], on_gone: Callable[[], None]) -> None:
        """Starts the thread.

        Args:
            tick: done in between; returns after how many seconds it should be done again.
            on_gone: called once, when the store is gone.
        """
        self.is_gone = False
        self._tick, self._on_gone = tick, on_gone
        self._began: float | None = None  # when the task that the store has yet to answer began
        self._is_patient = False  # that task may last: it is awaited by a ``call`` with a deadline of its own
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_silent(self) -> bool:
        """Whether the store has owed an answer for long: whoever asks more would wait in vain."""
        began = self._began
        return began is not None and not self._is_patient and time.monotonic() - began > SILENCE_S

    def call(self, task: Callable[[], Any], timeout: float) -> Any:
        """What ``task`` returns on the thread; None if it raised, took longer than ``timeout`` seconds, or the store
        is silent. A task that may take longer than ``SILENCE_S`` has a longer ``timeout``."""
        if threading.current_thread() is self._thread:
            return self._guard(task)
        if self.is_gone or self.is_silent:
            return None
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            self._is_patient = timeout > SILENCE_S
            try:
                result.append(task())
            finally:
                self._is_patient = False
                done.set()

        until = time.monotonic() + timeout
        self._tasks.put(run)
        while not done.wait(min(_LOOK_S, max(until - time.monotonic(), 0.0))):
            if self.is_gone or self.is_silent or time.monotonic() >= until:
                break
        return result[0] if result else None

    def tell(self, task: Callable[[], Any]) -> None:
        """Like ``call``, without waiting for it."""
        if not self.is_gone:
            self._tasks.put(task)

    def stop(self, timeout: float) -> None:
        """Ends the thread after what it has been handed; gives up waiting for that after ``timeout`` seconds."""
        self._tasks.put(_END)
        if self._thread is not threading.current_thread():
            self._thread.join(0.0 if self.is_silent else timeout)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=max(due - time.monotonic(), 0.0))
            except queue.Empty:
                task = None
            if task is _END:
                return
            if task is not None:
                self._guard(task)
            if time.monotonic() >= due:
                due = time.monotonic() + (self._guard(self._tick) or 1.0)

    def _guard(self, task: Callable[[], Any]) -> Any:
        if self.is_gone:
            return None
        self._began = time.monotonic()
        try:
            return task()
        except DistNetworkError:
            self.is_gone = True
            self._on_gone()
        except (RuntimeError, OSError, ValueError):
            return None  # one question that the store could not answer
        finally:
            self._began = None
        return None

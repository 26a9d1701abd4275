"""Calls that may block for ever, made on threads that can be given up: nobody waits for them past a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from microddp.errors import CollectiveTimeoutError
from microddp.transport.noticeboard import STORE_TIMEOUT_S

__all__ = ["CONNECT_GRACE_S", "BoundedStore", "run_bounded"]

CONNECT_GRACE_S: Final = 0.5
"""How long after its deadline a call that has a timeout of its own may still raise by itself: it says more."""

_POLL_S: Final = 0.005

Result = TypeVar("Result")


def run_bounded(
    task: Callable[[], Result], deadline: float, what: str, check: Callable[[], object] | None = None
) -> Result:
    """What ``task`` returns; it runs on a thread of its own, which is left behind (a daemon) if it does not end.

    Args:
        deadline: in ``time.monotonic()`` seconds.
        what: for the error: who does what.
        check: called again and again: raises if waiting has become pointless.

    Raises:
        CollectiveTimeoutError: the deadline passed.
        Exception: what ``task`` or ``check`` raises.
    """
    if check is not None:
        check()  # before a thread begins what nothing will end
    done, results, errors = threading.Event(), [], []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # raised below, on the caller's thread
            errors.append(error)
        finally:
            done.set()

    name = f"microddp-bounded for {threading.current_thread().name}"
    threading.Thread(target=run, name=name, daemon=True).start()
    while not done.wait(_POLL_S):
        if check is not None:
            check()
        if time.monotonic() >= deadline:
            raise CollectiveTimeoutError(f"{what}: the deadline passed")
    if errors:
        raise errors[0]
    return results[0]


class BoundedStore:
    """A torch.distributed store whose calls end: torch's own wait for ever if the store's host has been stopped.

    Raises:
        CollectiveTimeoutError: a call was not answered by the deadline, or within ``STORE_TIMEOUT_S`` if that is
            later; nor is any call after it.
    """

    def __init__(self, store: Any, deadline: float, who: str) -> None:
        """Args:
        deadline: in ``time.monotonic()`` seconds.
        who: for errors: who calls.
        """
        self.underlying_store = store
        self._deadline = deadline
        self._what = f"{who}, asking the store, whose host may be stopped"
        self._is_silent = False

    def set(self, key: str, value: str) -> None:
        """Writes a key."""
        self.call(lambda: self.underlying_store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self.call(lambda: self.underlying_store.get(key)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.call(lambda: self.underlying_store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns it."""
        return int(self.call(lambda: self.underlying_store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes a key if it holds ``expected``; returns what it holds then."""
        return bytes(self.call(lambda: self.underlying_store.compare_set(key, expected, desired)))

    def call(self, task: Callable[[], Result]) -> Result:
        """What ``task`` returns, which asks the store."""
        if self._is_silent:
            raise CollectiveTimeoutError(f"{self._what}: it did not answer before")
        try:
            return run_bounded(task, max(self._deadline, time.monotonic() + STORE_TIMEOUT_S), self._what)
        except CollectiveTimeoutError:
            self._is_silent = True
            raise

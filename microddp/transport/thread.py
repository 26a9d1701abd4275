"""The transport of ranks that are threads of one process: data goes straight from tensor to tensor.

The two ends of a message meet: whichever is posted later moves the data from the sender's memory into the receiver's
view, or hands the sender's view to the receiver's ``combine``. Nothing is staged, so that a send completes exactly
when its reader is done. CPU tensors; device tensors only where all ranks use the same stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from microddp.errors import ClosedError, CollectiveTimeoutError, RemoteError
from microddp.transport.base import Exchange, Header, Transport
from microddp.transport.thread_exchange import ThreadExchange
from microddp.transport.thread_state import WorldState

__all__ = ["ThreadTransport", "ThreadWorld", "run_thread_ranks"]

Result = TypeVar("Result")

GRACE_S = 5.0
"""How long ranks may take to notice that their world was aborted, before they are given up (daemon threads)."""

WAIT_SLICE_S = 0.2


class ThreadWorld:
    """``world_size`` ranks in one process.

    Raises:
        TypeError: ``world_size`` is not an int.
        ValueError: ``world_size`` is below 1.
    """

    def __init__(self, world_size: int) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool):
            raise TypeError(f"world_size must be an int, not {type(world_size).__name__} ({world_size!r})")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self._state = WorldState(world_size)
        self._transports = [ThreadTransport(self._state, rank) for rank in range(world_size)]

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of ``rank``, the same at every call, to be used by one thread.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank} in a world of {self.world_size}")
        return self._transports[rank]

    def abort(self, error: BaseException) -> None:
        """Makes every rank's pending and later collectives raise, on behalf of no rank."""
        self._state.abort(None, error)


class ThreadTransport(Transport):
    """One rank of a ``ThreadWorld``.

    A rank that raises, closes or aborts first waits until no other thread moves data from or to its tensors. A
    message whose data is already moving is therefore waited for beyond the deadline.
    """

    name = "thread"
    fuses_combine = True
    stream_ordered = False
    device_types = ("cpu", "cuda")

    def __init__(self, world: WorldState, rank: int) -> None:
        super().__init__(rank, len(world.ranks))
        self._world = world
        self._state = world.ranks[rank]

    def open(self, header: Header, deadline: float) -> Exchange:
        call = self._world.enter(self._state, header, deadline)
        if isinstance(call, BaseException):
            self._world.drain(self._state)
            raise call
        return ThreadExchange(self._world, call, self.counters)

    def reject(self, sequence: int, error: BaseException) -> None:
        self._world.reject(self._state, sequence, error)

    def abort(self, error: BaseException) -> None:
        self._world.abort(self._state, error)

    def close(self) -> None:
        self._world.close(self._state)


def run_thread_ranks(
    body: Callable[[ThreadTransport], Result], world_size: int, *, timeout: float | None = None
) -> list[Result]:
    """Calls ``body(transport)`` on one thread per rank and returns the results in rank order.

    A rank whose body returns has left: whoever still waits for it raises. When one raises, the others' collectives
    raise too, and all threads are joined before the first error is raised here, with notes that name its rank and
    what the other ranks raised.

    Args:
        timeout: seconds for all of it; None waits as long as the ranks take.

    Raises:
        TypeError, ValueError: ``world_size`` is not an int of at least 1.
        CollectiveTimeoutError: ranks were still running after ``timeout``. One that does not come back from its own
            code within a few seconds more is named and left to itself, as no thread can be stopped.
    """
    world = ThreadWorld(world_size)
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []  # in the order in which they were raised

    def run(rank: int) -> None:
        transport = world.transport(rank)
        try:
            results[rank] = body(transport)
        except BaseException as error:
            errors.append((rank, error))  # before the others can raise because of it
            transport.abort(error)
        finally:
            transport.close()

    threads = [_RankThread(rank, run) for rank in range(world_size)]
    try:
        overrun = _play(world, threads, timeout)
    except BaseException as interrupt:
        _note_errors(interrupt, errors)
        raise
    if errors or overrun is not None:
        _raise_first(errors, overrun)
    return [results[rank] for rank in range(world_size)]


class _RankThread(threading.Thread):
    """The thread of one rank. It says itself when it has ended: a ``join`` that is interrupted may call it ended."""

    def __init__(self, rank: int, body: Callable[[int], None]) -> None:
        super().__init__(name=f"microddp-rank-{rank}", daemon=True)
        self._body: Callable[[], None] = partial(body, rank)
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            self._body()
        finally:
            del self._body
            self._ended.set()

    def was_started(self) -> bool:
        """Also true in the middle of ``start``, where an interrupt may have come."""
        return self.ident is not None or self in threading.enumerate()

    def wait(self, deadline: float) -> bool:
        """Waits until the body has ended; False at the deadline.

        In slices, as an interrupt that comes just before the main thread falls asleep is seen when it wakes.
        """
        while not self._ended.wait(max(min(deadline - time.monotonic(), WAIT_SLICE_S), 0.0)):
            if time.monotonic() >= deadline:
                return False
        return True


def _play(world: ThreadWorld, threads: list[_RankThread], timeout: float | None) -> BaseException | None:
    """Starts and joins the ranks; returns an error if they took too long."""
    try:
        for thread in threads:
            thread.start()
        running = _join(threads, timeout)
        if not running:
            return None
        names = ", ".join(str(rank) for rank in running)
        overrun = CollectiveTimeoutError(f"rank {names} of {len(threads)} still running after {timeout} s")
        world.abort(overrun)
    except BaseException as interrupt:
        world.abort(interrupt)
        _note_left_behind(interrupt, _join(threads, GRACE_S))
        raise
    _note_left_behind(overrun, _join(threads, GRACE_S))
    return overrun


def _join(threads: list[_RankThread], timeout: float | None) -> list[int]:
    """Joins the threads that were started; returns the ranks of those that still run after ``timeout`` seconds."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    running = []
    for rank, thread in enumerate(threads):
        if thread.was_started():
            if thread.wait(deadline):
                thread.join()
            else:
                running.append(rank)
    return running


def _raise_first(errors: list[tuple[int, BaseException]], overrun: BaseException | None) -> NoReturn:
    """Raises the error that came first and is no mere consequence; the rest becomes its notes."""
    causes = [each for each in errors if not isinstance(each[1], (ClosedError, RemoteError))]
    if causes or overrun is None:
        first_rank, first = (causes or errors)[0]
        _add_note(first, f"raised on rank {first_rank}")
        if overrun is not None:
            _add_note(first, str(overrun))
    else:
        first = overrun
    _note_errors(first, errors)
    raise first


def _note_errors(first: BaseException, errors: list[tuple[int, BaseException]]) -> None:
    """Adds the first line of each other error as a note to ``first``."""
    for rank, error in errors:
        if error is not first:
            headline = str(error).partition("\n")[0]
            _add_note(first, f"rank {rank} raised {type(error).__name__}: {headline}")


def _note_left_behind(error: BaseException, ranks: list[int]) -> None:
    if ranks:
        names = ", ".join(str(rank) for rank in ranks)
        _add_note(error, f"the thread of rank {names} did not end; it is left behind as a daemon thread")


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10 shows no notes, but they can be read
        setattr(error, "__notes__", [*getattr(error, "__notes__", []), text])  # noqa: B010 - mypy knows no such attribute

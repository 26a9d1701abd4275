"""Ranks as threads of this process, each with an ``NcclTransport`` over the stand-in, or a communicator on one."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp import Communicator
from microddp.transport.nccl import NcclTransport
from tests.nccl.standin_runtime import StandInRuntime
from tests.transport.gloo_pool import QUICK_NAMES

__all__ = ["TIMEOUT_S", "Ranks", "on_ranks", "quick_switches", "with_comms"]

TIMEOUT_S = 30.0
RuntimeMaker = Callable[[], StandInRuntime]


@contextmanager
def quick_switches() -> Iterator[None]:
    """Ranks as threads hand the interpreter to each other all the time: not only every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Ranks:
    """What each rank's body raised or returned.

    Attributes:
        results, errors: by rank; one of both is None.
        seconds: from the start of the bodies to the end of the last.
    """

    def __init__(self, world_size: int) -> None:
        self.results: list[Any] = [None] * world_size
        self.errors: list[BaseException | None] = [None] * world_size
        self.seconds = 0.0

    def checked(self) -> list[Any]:
        """The results, if no rank raised."""
        for error in self.errors:
            if error is not None:
                raise error
        return self.results


def on_ranks(
    world_size: int,
    body: Callable[[NcclTransport], Any],
    *,
    make_runtime: RuntimeMaker = StandInRuntime,
    make_api: Callable[[int], Any] = lambda rank: None,
    timeout: float = TIMEOUT_S,
    **options: Any,
) -> Ranks:
    """Calls ``body(transport)`` on a thread for each rank, once all transports are made.

    A rank that raises aborts its transport. All transports stay as the bodies left them until all bodies have ended,
    then they are closed, and their streams must end. If no rank raised, no call on a stream may have raised.

    Args:
        make_api: of the rank, what takes the place of ``cupy.cuda.nccl``; None: that.
        options: for the transports.
    """
    world = _World([make_runtime() for _ in range(world_size)], make_api, timeout, options)
    try:
        with mock.patch.dict("os.environ", QUICK_NAMES):
            world.run(body)
    finally:
        for runtime in world.runtimes:
            runtime.close()
    if not any(world.ranks.errors):
        for runtime in world.runtimes:
            assert not runtime.errors, runtime.errors
    return world.ranks


class _World:
    def __init__(
        self,
        runtimes: list[StandInRuntime],
        make_api: Callable[[int], Any],
        timeout: float,
        options: dict[str, Any],
    ) -> None:
        self.ranks, self.runtimes = Ranks(len(runtimes)), runtimes
        self._make_api, self._timeout, self._options = make_api, timeout, options
        self._begin, self._end = threading.Barrier(len(runtimes)), threading.Barrier(len(runtimes))
        self._port = 0

    def run(self, body: Callable[[NcclTransport], Any]) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._port = server.port
        threads = [
            threading.Thread(target=self._work, args=(rank, body), name=f"rank {rank}", daemon=True)
            for rank in range(len(self.runtimes))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._timeout + 20)
        assert not any(thread.is_alive() for thread in threads), f"a rank hangs; raised so far: {self.ranks.errors}"

    def _work(self, rank: int, body: Callable[[NcclTransport], Any]) -> None:
        ranks, transport, begun = self.ranks, None, time.monotonic()
        try:
            transport = self._connect(rank)
            self._begin.wait(self._timeout)
            begun = time.monotonic()
            ranks.results[rank] = body(transport)
        except BaseException as error:
            ranks.errors[rank] = error
            if transport is None:
                self._begin.abort()
            else:
                transport.abort(error)
        ranks.seconds = max(ranks.seconds, time.monotonic() - begun)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._end.wait(self._timeout)
        if transport is not None:
            transport.close()

    def _connect(self, rank: int) -> NcclTransport:
        store = PrefixStore("nccl", TCPStore("127.0.0.1", self._port, None, False))
        return NcclTransport(
            store,
            rank,
            len(self.runtimes),
            timeout=self._timeout,
            runtime=self.runtimes[rank],
            api=self._make_api(rank),
            **self._options,
        )


def with_comms(
    world_size: int,
    body: Callable[[Communicator], Any],
    *,
    slice_nbytes: int | None = None,
    num_slots: int | None = None,
    timeout: float = TIMEOUT_S,
    **options: Any,
) -> Ranks:
    """As ``on_ranks``, with a communicator on each transport."""

    def work(transport: NcclTransport) -> Any:
        with Communicator(transport, timeout=timeout, slice_nbytes=slice_nbytes, num_slots=num_slots) as comm:
            return body(comm)

    return on_ranks(world_size, work, timeout=timeout, **options)

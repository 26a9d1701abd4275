"""What ranks do over the stand-in while one of them fails. Each takes its seat, and what the test passes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.communicator import Communicator
from microddp.transport.nccl import NcclTransport
from tests.nccl.faults_tools import HOST
from tests.nccl.standin_runtime import StandInRuntime

NUMEL = 256
SLICE_NBYTES = 64
SETUP_S = 20.0


@dataclass
class Seat:
    """Who a rank is, and its line to the test."""

    rank: int
    world_size: int
    port: int
    connection: Connection
    hosts_store: bool = False

    def report(self, name: str, value: object = None) -> None:
        self.connection.send((name, value, time.monotonic()))

    def hear(self) -> Any:
        return self.connection.recv()

    def store(self) -> Any:
        """The ranks' store: in the test's process, or in rank 0's."""
        store = TCPStore(HOST, self.port, None, False, timeout=timedelta(seconds=SETUP_S))
        if not self.hosts_store:
            return store
        if self.rank == 0:
            own = TCPStore(HOST, 0, None, True, wait_for_workers=False)
            store.set("port", str(own.port))
            return own
        return TCPStore(HOST, int(store.get("port")), None, False, timeout=timedelta(seconds=SETUP_S))

    def transport(self, **options: Any) -> NcclTransport:
        options.setdefault("timeout", SETUP_S)
        options.setdefault("runtime", StandInRuntime())
        return NcclTransport(PrefixStore("faults", self.store()), self.rank, self.world_size, address=HOST, **options)

    def communicator(self, timeout: float, **options: Any) -> Communicator:
        """Its transport holds sockets and threads; slices are small, so that a collective has many groups."""
        return Communicator(self.transport(**options), timeout=timeout, slice_nbytes=SLICE_NBYTES)

    @contextmanager
    def reporting(self, name: str = "raised") -> Iterator[None]:
        """Reports the error's type and text, and lets it go on; or that there was none."""
        try:
            yield
        except BaseException as error:
            self.report(name, (type(error).__name__, str(error)))
            raise
        self.report(name, ("", ""))


class Saboteur:
    """CuPy's module, in which this process meets its end once it has begun so many groups after ``arm``."""

    def __init__(self, strike: Callable[[], object]) -> None:
        from cupy.cuda import nccl

        self._nccl, self._strike = nccl, strike
        self._left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nccl, name)

    def arm(self, groups: int) -> None:
        self._left = groups

    def groupStart(self) -> None:
        if self._left == 0:
            self._strike()
        if self._left is not None:
            self._left -= 1
        self._nccl.groupStart()


def strike(seat: Seat, how: str) -> None:
    """Ends or stops this process on the spot."""
    seat.report("struck")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def values() -> torch.Tensor:
    return torch.ones(NUMEL)


def fall(
    seat: Seat, algorithm: str, victim: int, how: str, groups: int, timeout: float, hosts: bool, idle: int
) -> None:
    """``victim`` falls in mid-collective; ``idle`` (-1: no rank) is elsewhere meanwhile, and calls when told to."""
    seat.hosts_store = hosts
    api = Saboteur(lambda: strike(seat, how))
    with seat.communicator(timeout, api=api) as comm:
        comm.all_reduce(values(), algorithm=algorithm)
        comm.synchronize()
        comm.barrier()
        if seat.rank == victim:
            api.arm(groups)
        if seat.rank == idle:
            seat.report("idle")
            seat.hear()
        with seat.reporting():
            seat.report("calls")
            comm.all_reduce(values(), algorithm=algorithm)
            comm.synchronize()

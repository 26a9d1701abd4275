"""What ranks do over the stand-in while one of them fails. Each takes its seat, and what the test passes on."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import weakref
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
        if "runtime" not in options:
            options["runtime"] = StandInRuntime(blocking=False)  # a caller's host does not wait, as on a GPU
        # At exit, after the transport, which is made later: a device's streams are no threads of Python's, and what
        # these do must have ended before Python does.
        weakref.finalize(Seat, options["runtime"].close)
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


def has_failed(comm: Communicator) -> bool:
    """Whether its transport knows of a failure."""
    transport = comm._transport
    assert isinstance(transport, NcclTransport)
    return transport.failure is not None


def fall(seat: Seat, algorithm: str, victim: int, how: str, groups: int, timeout: float, hosts: bool) -> None:
    """``victim`` falls in mid-collective, before it begins its group number ``groups``."""
    seat.hosts_store = hosts
    api = Saboteur(lambda: strike(seat, how))
    with seat.communicator(SETUP_S, api=api) as comm:
        comm.all_reduce(values(), algorithm=algorithm)
        comm.synchronize()
        comm.barrier()
        comm.timeout = timeout
        if seat.rank == victim:
            api.arm(groups)
        if seat.rank == victim:
            seat.hear()  # that all others have called
        with seat.reporting():
            comm.all_reduce(values(), algorithm=algorithm)  # which does not block, as it is known
            seat.report("calls")
            comm.synchronize()


def next_call_of_the_idle(seat: Seat, victim: int) -> None:
    """``victim`` dies while all others are elsewhere; then they call."""
    with seat.communicator(20.0) as comm:
        comm.all_reduce(values(), algorithm="ring")
        comm.synchronize()
        comm.barrier()
        seat.report("idle")
        seat.hear()
        if seat.rank == victim:
            strike(seat, "kill")
        deadline = time.monotonic() + SETUP_S
        while not has_failed(comm) and time.monotonic() < deadline:
            time.sleep(0.001)
        seat.report("knows")
        with seat.reporting():
            comm.all_reduce(values(), algorithm="ring")


def endless(seat: Seat, algorithm: str) -> None:
    """Collectives one after the other, until something happens to some rank from outside."""
    with seat.communicator(20.0) as comm:
        tensor = values()
        comm.all_reduce(tensor, algorithm=algorithm)
        comm.synchronize()
        seat.report("running")
        with seat.reporting():
            while True:
                comm.all_reduce(tensor, algorithm=algorithm)
                comm.all_reduce(tensor, algorithm=algorithm)
                comm.synchronize()


def never_comes(seat: Seat, absent: int, known: bool, timeout: float) -> None:
    """``absent`` never calls the collective, which is ``known`` or new to all."""
    with seat.communicator(SETUP_S) as comm:
        comm.all_reduce(values(), algorithm="ring")
        comm.synchronize()
        comm.timeout = timeout
        if seat.rank == absent:
            seat.hear()
        algorithm = "ring" if known else "direct"
        with seat.reporting():
            seat.report("calls")
            comm.all_reduce(values(), algorithm=algorithm)
            comm.synchronize()


def paused(seat: Seat, calls: int) -> None:
    """Many collectives, while the test stops and continues a rank: right results, no error."""
    with seat.communicator(20.0) as comm:
        seat.report("running")
        for call in range(calls):
            tensor = torch.full((NUMEL,), float(seat.rank + call))
            comm.all_reduce(tensor, algorithm="ring")
            comm.synchronize()
            total = sum(rank + call for rank in range(seat.world_size))
            assert bool((tensor == total).all())
            if call == calls // 4:
                seat.report("a quarter")
    seat.report("done")


def computes(seat: Seat, busy: int, seconds: float) -> None:
    """Rank ``busy`` is in C for so long, with the interpreter's lock held; the others wait for it."""
    with seat.communicator(20.0) as comm:
        comm.all_reduce(values(), algorithm="ring")
        comm.synchronize()
        tensor = values()
        if seat.rank == busy:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a PyDLL's functions keep the lock
        comm.all_reduce(tensor, algorithm="ring")
        comm.synchronize()
        assert bool((tensor == seat.world_size).all())
    seat.report("done")


def leaves(seat: Seat, how: str) -> None:
    """Ends in one of several ways, never waiting for a pending collective."""
    comm = seat.communicator(20.0)
    comm.all_reduce(values(), algorithm="ring")
    comm.synchronize()
    comm.barrier()
    seat.report("leaves")
    if how in ("close", "twice") or (how == "one closes" and seat.rank == 0):
        comm.close()
    if how == "twice":
        comm.close()
    if how == "pending":
        comm.all_reduce(values(), algorithm="ring", async_op=True)
    if how == "half pending" and seat.rank == 0:
        comm.all_reduce(values(), algorithm="ring", async_op=True)
    if how == "failed":
        if seat.rank == 0:
            seat.hear()
            comm._transport.abort(RuntimeError("enough"))
        else:
            comm.barrier()
    if how == "interrupt":
        raise KeyboardInterrupt
    raise SystemExit(0)


def raises_inside(seat: Seat, culprit: int) -> None:
    """The user's code of one rank raises within ``with comm``; the others are in a collective."""
    with seat.communicator(20.0) as comm:
        comm.all_reduce(values(), algorithm="ring")
        comm.synchronize()
        if seat.rank == culprit:
            seat.hear()
            seat.report("struck")
            raise RuntimeError("the user's own")
        with seat.reporting():
            comm.all_reduce(values(), algorithm="ring")  # which does not block, as it is known
            seat.report("calls")
            comm.synchronize()


def closes_early(seat: Seat, early: int, known: bool) -> None:
    """Rank ``early`` closes in order; the others call a collective that is known, or new."""
    with seat.communicator(20.0) as comm:
        comm.all_reduce(values(), algorithm="ring")
        comm.synchronize()
        if seat.rank == early:
            seat.hear()
            seat.report("struck")
            return
        with seat.reporting():
            seat.report("calls")
            comm.all_reduce(values(), algorithm="ring" if known else "direct")
            comm.synchronize()

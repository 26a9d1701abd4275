"""Errors of NCCL and of the device while ranks work, and what is left once they have ended, well or not."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from microddp.communicator import Communicator
from microddp.errors import ClosedError, CollectiveTimeoutError, RemoteError, TransportError
from tests.conftest import settle
from tests.nccl.faults_cases import has_failed
from tests.nccl.faults_setup_cases import OnOneDevice
from tests.nccl.faults_threads import Api, expect, run_threads, set_up
from tests.nccl.standin_runtime import StandInRuntime
from tests.nccl.standin_tools import num_descriptors

pytestmark = [pytest.mark.usefixtures("standin", "quiet"), pytest.mark.timeout(60)]

SOON_S = 2.2


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_QUIET_DEATH", "1")


class Sick:
    """A communicator whose asynchronous error comes from the test."""

    def __init__(self, communicator: Any, error: list[Exception]) -> None:
        self._communicator, self._error = communicator, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def check_async_error(self) -> None:
        if self._error:
            raise self._error[0]


@pytest.mark.parametrize("what", ["NCCL", "KeyError", "device"])
def test_an_error_of_the_device_is_raised_by_every_rank(what: str) -> None:
    """What NCCL reports after a collective is no success, even if the stream has gone on."""
    errors: list[Exception] = []

    class SickApi(Api):
        def NcclCommunicator(self, *args: Any) -> Any:
            return Sick(self.nccl.NcclCommunicator(*args), errors)

    def body(rank: int, store: Any) -> None:
        runtime = StandInRuntime(blocking=False)
        transport = set_up(store, rank, 3, timeout=20.0, runtime=runtime, api=SickApi() if rank == 1 else None)
        with Communicator(transport, timeout=20.0) as comm:
            comm.all_reduce(torch.ones(10))
            comm.synchronize()
            comm.barrier()
            if rank == 1 and what == "device":
                runtime.failure = RuntimeError("an illegal address")
            elif rank == 1:
                errors.append(KeyError(8) if what == "KeyError" else transport.api.NcclError(3))
            comm.all_reduce(torch.ones(10))
            deadline = time.monotonic() + 10
            while rank != 1 and not has_failed(comm) and time.monotonic() < deadline:
                time.sleep(0.001)
            comm.synchronize()

    outcomes = run_threads(range(3), body)
    text = {"NCCL": "NCCL result 3", "KeyError": "NCCL result 8", "device": "an illegal address"}[what]
    expect(outcomes, TransportError, "rank 1", text, within=SOON_S)
    assert "all_reduce by" in str(outcomes[1].error)


def test_an_error_of_nccl_waits_for_the_rank_that_caused_it() -> None:
    """NCCL says no more than that a peer is gone; why, the peer says, a moment later."""
    struck = threading.Event()

    class Struck(Api):
        def groupStart(self) -> None:
            if armed.is_set():
                struck.set()
                raise self.nccl.NcclError(6)
            self.nccl.groupStart()

    armed = threading.Event()

    def body(rank: int, store: Any) -> None:
        transport = set_up(store, rank, 2, timeout=20.0, api=Struck() if rank == 1 else None)
        with Communicator(transport, timeout=20.0) as comm:
            comm.all_reduce(torch.ones(10))
            comm.synchronize()
            comm.barrier()
            if rank == 0:
                struck.wait(10)
                time.sleep(0.1)  # the moment
                raise RuntimeError("the reason")
            armed.set()
            comm.all_reduce(torch.ones(10))

    outcome = run_threads(range(2), body)[1]
    expect({1: outcome}, RemoteError, "all_reduce by", "rank 0 raised RuntimeError: the reason", within=SOON_S)


def test_the_device_has_stopped_when_the_error_is_raised() -> None:
    """Who gets it may free the tensors."""
    over = threading.Event()

    class SlowToStop(Sick):
        def abort(self) -> None:
            time.sleep(0.2)
            self._communicator.abort()

    class SlowApi(Api):
        def NcclCommunicator(self, *args: Any) -> Any:
            return SlowToStop(self.nccl.NcclCommunicator(*args), [])

    def body(rank: int, store: Any) -> None:
        runtime = StandInRuntime(blocking=False)
        transport = set_up(store, rank, 2, runtime=runtime, api=SlowApi())
        comm = Communicator(transport, timeout=1.0)
        try:
            comm.all_reduce(torch.ones(10))
            comm.synchronize()
            if rank == 1:
                over.wait(20)
                return
            comm.all_reduce(torch.ones(10))
            with pytest.raises(CollectiveTimeoutError, match="rank 1 has not entered it"):
                comm.synchronize()
            runtime.synchronize(0.05)  # raises if a stream is still at work
        finally:
            over.set()
            comm.close()
            runtime.close()

    assert [each.error for each in run_threads(range(2), body).values()] == [None, None]


@pytest.mark.parametrize("end", ["in order", "after a failure", "twice"])
def test_nothing_is_left_behind(end: str) -> None:
    """No descriptor, no thread; a second close does nothing, and what is closed says so."""

    all_here = threading.Barrier(3)

    def body(rank: int, store: Any) -> None:
        runtime = StandInRuntime(blocking=False)
        comm = Communicator(set_up(store, rank, 3, timeout=20.0, runtime=runtime), timeout=20.0)
        comm.all_reduce(torch.ones(10), algorithm="direct")
        comm.synchronize()
        all_here.wait(20)  # the communicator's own barrier would still be in some ranks' way
        if end == "after a failure":
            if rank == 1:
                comm._transport.abort(RuntimeError("enough"))
            with pytest.raises((ClosedError, RemoteError), match="enough"):
                comm.barrier()
        for _ in range(2 if end == "twice" else 1):
            comm.close()
        with pytest.raises(ClosedError, match="closed"):
            comm.all_reduce(torch.ones(10))
        runtime.close()

    for _ in range(2):  # what comes once for all is there after the first time
        before = resources()
        assert all(each.error is None for each in run_threads(range(3), body).values())
    assert not settle(lambda: more_than(before))


def test_a_set_up_that_failed_leaves_nothing_behind() -> None:
    def body(rank: int, store: Any) -> None:
        runtime = OnOneDevice(blocking=False)
        try:
            set_up(store, rank, 2, runtime=runtime)
        finally:
            runtime.close()

    for _ in range(2):
        before = resources()
        assert all(isinstance(each.error, TransportError) for each in run_threads(range(2), body).values())
    assert not settle(lambda: more_than(before))


def resources() -> tuple[int, int]:
    """Descriptors and threads. A store's connection ends with the object, which cycles may keep for a while."""
    gc.collect()
    return num_descriptors(), threading.active_count()


def more_than(before: tuple[int, int]) -> list[str]:
    descriptors, threads = resources()
    more = [f"{descriptors - before[0]} more descriptors"] * (descriptors > before[0])
    return more + [each.name for each in threading.enumerate()] * (threads > before[1])

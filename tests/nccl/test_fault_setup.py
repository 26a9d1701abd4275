"""Ranks that do not get as far as a communicator, or whose device fails: nobody waits for them, all know why."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microddp.errors import CollectiveTimeoutError, RemoteError, TransportError
from tests.conftest import settle
from tests.nccl import faults_setup_cases as cases
from tests.nccl.faults_setup_cases import OnOneDevice
from tests.nccl.faults_threads import Api, expect, run_threads, set_up
from tests.nccl.faults_tools import Zygote, zygote
from tests.nccl.standin_runtime import StandInRuntime

pytestmark = [pytest.mark.usefixtures("standin", "quiet"), pytest.mark.timeout(60)]

FULL = os.environ.get("MICRODDP_NCCL_FULL") == "1"
TIMEOUT_S = 1.0
LATE_S = 1.0  # after the timeout
AT_ONCE_S = 1.2

in_processes = pytest.mark.skipif(not FULL, reason="MICRODDP_NCCL_FULL=1 runs it")


@pytest.fixture(scope="module")
def nursery(standin_library: Path) -> Iterator[Zygote]:
    with zygote() as made:
        yield made


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_QUIET_DEATH", "1")


def test_a_rank_that_does_not_exist_is_waited_for_until_the_timeout() -> None:
    outcomes = run_threads([1, 2], lambda rank, store: set_up(store, rank, 3, timeout=TIMEOUT_S))
    expect(outcomes, CollectiveTimeoutError, "rank 0 did not say where its GPU is", within=TIMEOUT_S + LATE_S)


def test_a_unique_id_that_cannot_be_made() -> None:
    class Failing(Api):
        def get_unique_id(self) -> bytes:
            raise self.nccl.NcclError(2)

    outcomes = run_threads(
        range(3), lambda rank, store: set_up(store, rank, 3, timeout=TIMEOUT_S, api=Failing() if rank == 0 else None)
    )
    expect(outcomes, TransportError, "rank 0", "could not make a unique id", "NCCL result 2", within=AT_ONCE_S)


def test_a_unique_id_that_takes_too_long() -> None:
    others_gave_up = threading.Event()

    class Slow(Api):
        def get_unique_id(self) -> bytes:
            others_gave_up.wait(20)
            made: bytes = self.nccl.get_unique_id()
            return made

    def body(rank: int, store: Any) -> None:
        try:
            set_up(store, rank, 3, timeout=TIMEOUT_S, api=Slow() if rank == 0 else None)
        finally:
            if rank == 2:
                others_gave_up.set()

    outcomes = run_threads(range(3), body)
    expect(outcomes, CollectiveTimeoutError, "rank 0 published no unique id", within=TIMEOUT_S + LATE_S)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_without_a_gpu_tells_the_others_at_once(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(device: object) -> None:
        raise TransportError("there is no CUDA device")

    monkeypatch.setattr("microddp.device_cuda.CudaRuntime", no_device)

    def body(rank: int, store: Any) -> None:
        runtime = None if rank == odd else StandInRuntime(blocking=False)
        set_up(store, rank, 3, timeout=20.0, runtime=runtime)

    outcomes = run_threads(range(3), body)
    assert str(outcomes[odd].error) == "there is no CUDA device"
    expect(outcomes, TransportError, "there is no CUDA device", within=AT_ONCE_S)
    for rank in {0, 1, 2} - {odd}:
        assert isinstance(outcomes[rank].error, RemoteError)
        assert f"rank {odd} failed to set up" in str(outcomes[rank].error)


def test_two_ranks_on_one_gpu_are_told_before_nccl_is_called() -> None:
    api = Api()

    def body(rank: int, store: Any) -> None:
        runtime = StandInRuntime(blocking=False) if rank == 1 else OnOneDevice(blocking=False)
        set_up(store, rank, 3, timeout=20.0, runtime=runtime, api=api)

    outcomes = run_threads(range(3), body)
    expect(outcomes, TransportError, "NCCL takes one rank a GPU, but ranks 0, 2 on", "use GPU GPU-1", within=AT_ONCE_S)
    assert api.num_made == 0


@in_processes
@pytest.mark.parametrize("how", ["hosts", "allowed"])
def test_what_lets_two_ranks_share_a_gpu(nursery: Zygote, how: str) -> None:
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if how == "allowed" else None
    with nursery.ranks(cases.shares_a_device, 2, how == "hosts", env=env) as ranks:
        for each in ranks:
            assert each.wait_for("raised")[0] == ("", "")


def test_a_communicator_that_is_never_made() -> None:
    given_up = threading.Event()

    class Hanging(Api):
        def NcclCommunicator(self, *args: Any) -> Any:
            given_up.wait(20)
            return self.nccl.NcclCommunicator(*args)

    outcomes = run_threads(
        range(3), lambda rank, store: set_up(store, rank, 3, timeout=TIMEOUT_S, api=Hanging() if rank == 1 else None)
    )
    given_up.set()  # so that no thread is left behind
    expect(outcomes, CollectiveTimeoutError, "making the NCCL communicator", within=TIMEOUT_S + LATE_S)
    assert not settle(lambda: [each.name for each in threading.enumerate() if "microddp-bounded" in each.name])


@in_processes
@pytest.mark.parametrize("hosts", [False, True], ids=["", "hosts_the_store"])
def test_rank_0_is_stopped_before_it_publishes_the_id(nursery: Zygote, hosts: bool) -> None:
    with nursery.ranks(cases.never_an_id, 3, "stop", hosts, TIMEOUT_S) as ranks:
        ranks[0].wait_for("struck")
        for each in ranks[1:]:
            (kind, text), raised = each.wait_for("raised")
            assert kind == "CollectiveTimeoutError"
            wanted = "asking the store, whose host may be stopped" if hosts else "rank 0 published no unique id within"
            assert wanted in text
            assert raised - each.wait_for("calls")[1] < TIMEOUT_S + LATE_S
            assert each.exit()[0] == 1


@in_processes
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies_as_it_makes_the_communicator(nursery: Zygote, victim: int) -> None:
    with nursery.ranks(cases.dies_at_the_constructor, 3, victim) as ranks:
        _, struck = ranks[victim].wait_for("struck")
        for each in ranks:
            if each.rank != victim:
                (kind, text), raised = each.wait_for("raised")
                assert kind == "TransportError"
                assert f"lost its connection to rank {victim}" in text
                assert raised - struck < 2.0

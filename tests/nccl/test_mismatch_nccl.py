"""Ranks that call different things over the stand-in: every rank raises, with both values, before or soon after."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from microddp.communicator import Communicator
from microddp.errors import ClosedError, MismatchError, RemoteError
from microddp.transport.nccl import NcclTransport
from tests.nccl.faults_cases import has_failed
from tests.nccl.faults_threads import Outcome, run_threads
from tests.nccl.faults_tools import HOST
from tests.nccl.standin_runtime import StandInRuntime

pytestmark = [pytest.mark.usefixtures("standin", "quiet"), pytest.mark.timeout(60)]

SOON_S = 1.5
SETUP_S = 1.0  # of the ranks' transports and first calls, on a busy machine
TIMEOUT_S = 20.0

PLACES = [(2, 1), (3, 1), (4, 2)] if os.environ.get("MICRODDP_NCCL_FULL") == "1" else [(4, 2)]

Call = dict[str, Any]
SUM: Call = {"numel": 6}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_QUIET_DEATH", "1")


@contextmanager
def communicator(rank: int, world_size: int, store: Any) -> Iterator[Communicator]:
    runtime = StandInRuntime(blocking=False)  # the caller's host does not wait, as on a GPU
    transport = NcclTransport(store, rank, world_size, timeout=TIMEOUT_S, runtime=runtime, address=HOST)
    comm = Communicator(transport, timeout=TIMEOUT_S, slice_nbytes=64)
    try:
        yield comm
    finally:
        comm.close()
        runtime.close()


def all_reduce(comm: Communicator, call: Call) -> None:
    """Of ones, of the shape and type that the call has beside its options."""
    options = dict(call)
    shape, dtype = options.pop("shape", (options.pop("numel", 6),)), options.pop("dtype", torch.float32)
    comm.all_reduce(torch.ones(shape, dtype=dtype), **options)


def until_it_fails(comm: Communicator) -> None:
    """What is found out behind a caller's back is raised when it next waits."""
    deadline = time.monotonic() + TIMEOUT_S
    while not has_failed(comm) and time.monotonic() < deadline:
        comm.synchronize()
        time.sleep(0.005)
    comm.synchronize()


def outcomes_of(world_size: int, body: Callable[[Communicator, int], object]) -> dict[int, Outcome]:
    """Of ``body(comm, rank)`` on all ranks. Once it has raised, every later call must raise ClosedError and say why."""

    def run(rank: int, store: Any) -> None:
        with communicator(rank, world_size, store) as comm:
            try:
                body(comm, rank)
            except Exception as error:
                if not isinstance(error, ValueError):
                    with pytest.raises(ClosedError) as later:
                        all_reduce(comm, SUM)
                    assert later.value.args[0].count("disagree") or "refused" in str(later.value)
                raise

    return run_threads(range(world_size), run)


def expect_mismatch(outcomes: dict[int, Outcome], *texts: str) -> None:
    for rank, outcome in outcomes.items():
        assert isinstance(outcome.error, MismatchError), f"rank {rank}: {outcome}"
        for text in texts:
            assert text in str(outcome.error)
        assert outcome.seconds < SOON_S + SETUP_S


DIFFERENT: dict[str, tuple[Call, Call, str, str]] = {
    "numel": ({"numel": 6}, {"numel": 7}, "shape is (6,) on", "(7,) on"),
    "shape": ({"shape": (2, 3)}, {"shape": (3, 2)}, "shape is (2, 3) on", "(3, 2) on"),
    "dtype": ({}, {"dtype": torch.int32}, "dtype is 'float32' on", "'int32' on"),
    "op": ({"op": "sum"}, {"op": "max"}, "op is 'sum' on", "'max' on"),
    "algorithm": ({"algorithm": "ring"}, {"algorithm": "tree"}, "algorithm is 'ring' on", "'tree' on"),
    "order": (
        {"algorithm": "full_ring", "order": "rank"},
        {"algorithm": "full_ring"},
        "algorithm is 'full_ring in rank order' on",
        "'full_ring' on",
    ),
    "nothing": ({"numel": 0}, {"numel": 3}, "shape is (0,) on", "(3,) on"),
    "something": ({"numel": 3}, {"numel": 0}, "shape is (3,) on", "(0,) on"),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize(("world_size", "odd"), PLACES)
def test_a_new_call_is_compared_before_anything_is_enqueued(what: str, world_size: int, odd: int) -> None:
    usual, other, *texts = DIFFERENT[what]
    moved = []

    def body(comm: Communicator, rank: int) -> None:
        try:
            all_reduce(comm, dict(other if rank == odd else usual))
            comm.synchronize()
        finally:
            moved.append(comm.counters.bytes_sent)

    outcomes = outcomes_of(world_size, body)
    ranks = [rank for rank in range(world_size) if rank != odd]
    name = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    # Values are listed in the order of the ranks; rank 0 is a usual one.
    expect_mismatch(outcomes, f"{texts[0]} {name}", f"{texts[1]} rank {odd}", "about collective 0")
    assert moved == [0] * world_size


@pytest.mark.parametrize("odd", [0, 1])
def test_one_rank_calls_what_is_new_and_the_others_what_is_known(odd: int) -> None:
    """The others have enqueued it, and wait."""

    def body(comm: Communicator, rank: int) -> None:
        all_reduce(comm, SUM)
        comm.synchronize()
        all_reduce(comm, {"numel": 5} if rank == odd else SUM)
        until_it_fails(comm)

    expect_mismatch(outcomes_of(3, body), "(6,) on rank", f"(5,) on rank {odd}", "about collective 1")


SWAPPED: dict[str, tuple[Call, Call, str, str]] = {
    "op": ({"op": "sum"}, {"op": "max"}, "'sum' on", "'max' on"),  # all bytes fit: the results are wrong
    "dtype": ({}, {"dtype": torch.int32}, "'float32' on", "'int32' on"),
    "numel": ({"numel": 6}, {"numel": 70}, "(6,) on", "(70,) on"),  # NCCL may hang, or not
    "algorithm": ({"algorithm": "ring"}, {"algorithm": "tree"}, "'ring' on", "'tree' on"),
}


@pytest.mark.parametrize("what", SWAPPED)
@pytest.mark.parametrize(("world_size", "odd"), PLACES)
def test_known_calls_in_another_order_are_found_out_afterwards(what: str, world_size: int, odd: int) -> None:
    usual, other, *texts = SWAPPED[what]

    def body(comm: Communicator, rank: int) -> None:
        for call in (usual, other):
            all_reduce(comm, dict(call))
        comm.barrier()
        for call in (other, usual) if rank == odd else (usual, other):
            all_reduce(comm, dict(call))
        until_it_fails(comm)

    expect_mismatch(outcomes_of(world_size, body), *texts, f"rank {odd}", "about collective 3")


@pytest.mark.parametrize("known", [True, False])
def test_a_refused_argument_on_one_rank_raises_on_the_others(known: bool) -> None:
    def body(comm: Communicator, rank: int) -> None:
        if known:
            all_reduce(comm, SUM)
            comm.synchronize()
        all_reduce(comm, {"op": "no such"} if rank == 1 else SUM)
        until_it_fails(comm)

    outcomes = outcomes_of(3, body)
    assert isinstance(outcomes[1].error, ValueError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RemoteError), outcomes[rank]
        assert f"rank 1 refused collective {int(known)}: ValueError" in str(outcomes[rank].error)
        assert outcomes[rank].seconds < SOON_S + SETUP_S


def test_a_call_that_all_refuse_leaves_the_communicator_usable() -> None:
    def body(comm: Communicator, rank: int) -> None:
        with pytest.raises(ValueError):
            all_reduce(comm, {"op": "no such"})
        for _ in range(2):
            tensor = torch.full((6,), float(rank))
            comm.all_reduce(tensor)
            comm.synchronize()
            assert tensor.tolist() == [3.0] * 6

    assert all(outcome.error is None for outcome in outcomes_of(3, body).values())

"""From init to close: environment, threads, processes, every way to end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import microddp
from microddp import ClosedError, CollectiveTimeoutError, Communicator, RemoteError, TransportError
from microddp.arrays import Operand
from microddp.transport.thread import ThreadWorld
from microddp_kernels.operators import get_op
from tests.api.tools import outcomes, run

pytestmark = pytest.mark.timeout(110)

GRACE_S = 5.0  # a busy machine
ROOT = Path(__file__).parents[2]


def test_init_alone() -> None:
    with microddp.init() as comm:
        assert (comm.rank, comm.world_size, comm.transport_name) == (0, 1, "thread")
        assert repr(comm) == "<Communicator rank 0 of 1 over thread>"
        assert comm.last_choice is None
        comm.barrier()
    assert repr(comm) == "<Communicator rank 0 of 1 over thread, closed>"


def test_init_with_a_transport_of_ones_own() -> None:
    with microddp.init(ThreadWorld(1).transport(0), timeout=5) as comm:
        assert comm.timeout == 5


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, ("WORLD_SIZE",)),
        ({"WORLD_SIZE": "2"}, ("RANK",)),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, ("RANK", "2")),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, ("WORLD_SIZE", "two")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_ADDR", "MASTER_PORT")),
    ],
)
@pytest.mark.parametrize("transport", [None, "gloo"])
def test_partial_or_wrong_environment_is_named(
    variables: dict[str, str], words: tuple[str, ...], transport: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        microddp.init(transport)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("transport", "words"),
    [("gloo", ("RANK", "WORLD_SIZE")), ("thread", ("run_threads",)), ("ncl", ("'ncl'", "gloo", "thread"))],
)
def test_transports_that_init_cannot_make(transport: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        microddp.init(transport)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1.0}, {"slice_nbytes": 24}, {"num_slots": 0}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        microddp.init(**options)


def test_results_in_rank_order_and_arguments() -> None:
    assert microddp.run_threads(lambda comm, *args: (comm.rank, args), 3, args=(1, "a")) == [
        (rank, (1, "a")) for rank in range(3)
    ]


def test_first_error_of_threads_is_raised_and_the_others_hear_of_it() -> None:
    heard: list[str] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ArithmeticError("boom")
        try:
            comm.all_reduce(torch.ones(3))
        except RemoteError as error:
            heard.append(str(error))
            raise

    with pytest.raises(ArithmeticError, match="boom"):
        run(body, 3)
    assert len(heard) == 2
    assert all("rank 2 raised ArithmeticError: boom" in text and "in body" in text for text in heard)


def test_absent_rank_is_named_in_time_and_the_communicator_is_broken() -> None:
    gave_up = threading.Event()

    def body(comm: Communicator) -> Any:
        if comm.rank == 1:
            assert gave_up.wait(20)
            return comm.all_reduce(torch.ones(3), algorithm="ring")
        comm.timeout = 0.2
        try:
            return comm.all_reduce(torch.ones(3), algorithm="ring")
        finally:
            gave_up.set()
            with pytest.raises(ClosedError, match="cannot be used"):
                comm.all_reduce(torch.ones(3))

    errors = outcomes(body, 2)
    assert type(errors[0]) is CollectiveTimeoutError and isinstance(errors[0], TimeoutError)
    for word in ("rank 0 of 2", "ring", "sum", "step 0", "rank 1"):
        assert word in str(errors[0])
    assert isinstance(errors[1], TransportError)


def test_close_twice_on_one_rank_only_and_use_after_close() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 0:
            comm.close()
            comm.close()
            for call in (lambda: comm.all_reduce(torch.ones(1)), comm.barrier, lambda: comm.broadcast(3)):
                with pytest.raises(ClosedError, match="rank 0 of 2.*it was closed"):
                    call()
            assert comm.staging_nbytes == 0
            return None
        return comm.all_reduce(torch.ones(3))

    closed, error = outcomes(body, 2)
    assert closed is None
    assert isinstance(error, TransportError) and "rank 0 closed" in str(error)


def test_with_block_that_raises_tells_the_others() -> None:
    world = ThreadWorld(2)
    with pytest.raises(KeyError), Communicator(world.transport(0)):
        raise KeyError("lost")
    with Communicator(world.transport(1)) as other, pytest.raises(RemoteError, match="KeyError: 'lost'"):
        other.barrier()


def test_failure_while_combining_names_the_rank_and_breaks_all() -> None:
    def explode(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("boom")

    op = replace(get_op("sum"), name="explode", eager=explode)
    for error in outcomes(lambda comm: comm.all_reduce(torch.ones(3), op=op, algorithm="tree"), 3):
        assert isinstance(error, (TransportError, ArithmeticError))
        assert "boom" in str(error)


def test_failure_before_the_plan_runs_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Operand.copy

    def fail_on_rank_one(operand: Operand) -> torch.Tensor:
        if operand.tensor[0] == 1:
            raise MemoryError("no room")
        return copy(operand)

    monkeypatch.setattr(Operand, "copy", fail_on_rank_one)

    def body(comm: Communicator) -> Any:
        try:
            return comm.reduce_scatter(torch.full((3,), comm.rank))
        finally:
            with pytest.raises(ClosedError, match="no room"):
                comm.barrier()

    errors = outcomes(body, 3)
    assert type(errors.pop(1)) is MemoryError
    for error in errors:
        assert type(error) is RemoteError and "rank 1 raised MemoryError: no room" in str(error)


def test_forgotten_communicator_closes_itself() -> None:
    world = ThreadWorld(2)
    comm = Communicator(world.transport(0))
    del comm
    with Communicator(world.transport(1)) as other, pytest.raises(TransportError, match="rank 0 closed"):
        other.barrier()


def _average(comm: Communicator, scale: float) -> tuple[list[float], str, list[float], str]:
    x = torch.arange(5.0) * scale * (comm.rank + 1)
    work = comm.all_reduce(x, op="avg", async_op=True)
    averaged, gathered = work.wait().tolist(), comm.all_gather(torch.tensor(comm.rank + 0.5)).tolist()
    try:
        comm.all_reduce(torch.ones(3), op="average" if comm.rank == 1 else "sum")
    except (ValueError, RemoteError) as error:
        with contextlib.suppress(TransportError, ClosedError):
            comm.barrier()  # a rank that has refused stays until the others have heard of it
        return averaged, comm.transport_name, gathered, f"{type(error).__name__}: {error}"
    return averaged, comm.transport_name, gathered, "no error"


def test_processes() -> None:
    results = microddp.run_processes(_average, 2, args=(2.0,), timeout=100)
    assert [each[:3] for each in results] == [([0.0, 3.0, 6.0, 9.0, 12.0], "gloo", [0.5, 1.5])] * 2
    remote, mine = results[0][3], results[1][3]
    assert remote.startswith("RemoteError: rank 0 of 2") and "rank 1" in remote and "'average'" in remote
    assert mine.startswith("ValueError: rank 1 of 2, all_reduce: unknown operator 'average'")


def _refuse_and_leave(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(1 << 16), op="average" if comm.rank == 1 else "avg")


def test_the_refusal_is_what_the_caller_of_several_processes_sees() -> None:
    """Not the error of a rank that only heard of it, nor that the one that refused has left."""
    with pytest.raises(ValueError, match="unknown operator 'average'") as caught:
        microddp.run_processes(_refuse_and_leave, 3, timeout=100)
    assert "rank 1" in str(caught.value)


SCRIPTS = {
    "idle worker, never closed": "comm.all_reduce(torch.ones(3), async_op=True).wait()",
    "pending work, never closed, exit": "other.all_reduce(torch.ones(3), async_op=True); comm.close()",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_way_to_exit_is_quick_and_quiet(name: str) -> None:
    code = (
        "import sys, time, torch, microddp\n"
        "from microddp.transport.thread import ThreadWorld\n"
        "comm, other = microddp.init(), microddp.init(ThreadWorld(2).transport(0))\n"
        f"{SCRIPTS[name]}\nprint(time.monotonic(), flush=True)\nsys.exit(0)\n"
    )
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    exit_s = time.monotonic() - float(done.stdout)
    assert done.returncode == 0, done.stderr
    assert exit_s < 5 + GRACE_S
    expected = ["rank 0 of 2, all_reduce failed and nobody waited"] if "pending" in name else []
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected) and all(line.startswith(text) for line, text in zip(lines, expected)), lines

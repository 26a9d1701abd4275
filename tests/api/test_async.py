"""Work in the background: order, results, errors at wait, time-outs, and what becomes of it at the end."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import Any

import pytest
import torch

import microddp
from microddp import ClosedError, Communicator, RemoteError, Work
from microddp.transport.thread import ThreadWorld
from tests.api.tools import outcomes, run

pytestmark = pytest.mark.timeout(60)


def test_works_run_in_order_and_return_what_the_call_would() -> None:
    def body(comm: Communicator) -> None:
        x, out = torch.ones(5), torch.empty(5)
        column = torch.ones(4, 2)[:, 0]
        works: list[Work[torch.Tensor]] = [
            comm.all_reduce(x, async_op=True),
            comm.all_reduce(x, async_op=True),
            comm.all_reduce(x, out=out, op="max", async_op=True),
            comm.all_reduce(column, async_op=True),
            comm.all_reduce(column, async_op=True),
        ]
        last = comm.all_gather(x, async_op=True)
        assert last.wait().tolist() == [9.0] * 15
        assert all(work.done() for work in works)
        assert works[0].wait() is x and works[2].wait() is out and works[3].wait() is column
        assert out.tolist() == [9.0] * 5 and column.tolist() == [9.0] * 4
        assert comm.reduce_scatter(torch.ones(6), async_op=True).wait().tolist() == [3.0, 3.0]
        assert comm.broadcast(torch.full((2,), comm.rank), 1, async_op=True).wait().tolist() == [1, 1]
        assert comm.reduce(torch.ones(2), root=comm.rank * 0, async_op=True).wait() is not None

    run(body, 3)


def test_one_daemon_worker_that_is_joined() -> None:
    def body(comm: Communicator) -> threading.Thread:
        names = {thread.name for thread in threading.enumerate()}
        assert f"microddp-worker-{comm.rank}" not in names
        for _ in range(3):
            comm.all_reduce(torch.ones(1), async_op=True).wait()
        mine = [each for each in threading.enumerate() if each.name == f"microddp-worker-{comm.rank}"]
        assert len(mine) == 1 and mine[0].daemon
        return mine[0]

    assert not any(thread.is_alive() for thread in run(body, 2))


def test_synchronous_call_queues_behind_asynchronous_ones() -> None:
    may_enter = threading.Event()

    def body(comm: Communicator) -> None:
        x = torch.ones(3)
        if comm.rank == 1:
            assert may_enter.wait(10)
        work = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            may_enter.set()
        comm.all_reduce(x)
        assert work.done()
        assert x.tolist() == [4.0] * 3

    run(body, 2)


def test_wait_gives_up_and_the_work_goes_on() -> None:
    gave_up = threading.Event()

    def body(comm: Communicator) -> None:
        x = torch.ones(3)
        if comm.rank == 1:
            assert gave_up.wait(10)
            comm.all_reduce(x)
            return
        work = comm.all_reduce(x, async_op=True)
        for _ in range(2):
            with pytest.raises(TimeoutError, match="rank 0 of 2, all_reduce has not ended after 0.01 s"):
                work.wait(0.01)
        assert not work.done() and "pending" in repr(work)
        gave_up.set()
        assert work.wait(10) is x and x.tolist() == [2.0] * 3
        assert work.done() and "done" in repr(work)

    run(body, 2)


def test_failure_is_raised_at_every_wait_and_ends_the_communicator() -> None:
    has_called = threading.Event()
    checked: list[int] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert has_called.wait(10)
            raise ArithmeticError("boom")
        work = comm.all_reduce(torch.ones(3), async_op=True)
        later = comm.all_reduce(torch.ones(3), async_op=True)
        has_called.set()
        for _ in range(2):
            with pytest.raises(RemoteError, match="boom") as raised:
                work.wait()
            assert str(raised.value).count("rank 0 of 2, all_reduce") == 1
        with pytest.raises(ClosedError, match="boom"):
            later.wait()
        assert work.done() and "failed" in repr(work)
        with pytest.raises(ClosedError, match="boom"):
            comm.barrier()
        with pytest.raises(ClosedError, match="boom"):
            comm.all_reduce(torch.ones(3), async_op=True)
        checked.append(1)

    with pytest.raises(ArithmeticError, match="boom"):
        run(body, 2)
    assert checked


def test_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ArithmeticError("boom")
        comm.all_reduce(torch.ones(3), async_op=True)

    with caplog.at_level(logging.ERROR, logger="microddp"), pytest.raises(ArithmeticError):
        run(body, 2)
    gc.collect()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "rank 0 of 2, all_reduce failed and nobody waited for it" in texts[0]


def test_failure_that_was_waited_for_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 0:
            return comm.all_reduce(torch.ones(3), async_op=True).wait()
        return comm.close()

    with caplog.at_level(logging.ERROR, logger="microddp"):
        outcomes(body, 2)
        gc.collect()
    assert not caplog.records


def test_close_finishes_what_can_finish() -> None:
    def body(comm: Communicator) -> Work[torch.Tensor]:
        works = [comm.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
        comm.close()
        assert all(work.wait().tolist() == [3.0] * 1000 for work in works)
        return works[0]

    run(body, 3)


def test_close_aborts_what_cannot_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microddp.calls.CLOSE_GRACE_S", 0.2)
    world = ThreadWorld(2)
    comm = Communicator(world.transport(0))
    work = comm.all_reduce(torch.ones(3), async_op=True)
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < 5
    with pytest.raises(ClosedError):
        work.wait(5)
    assert not any(thread.name == "microddp-worker-0" for thread in threading.enumerate())
    with Communicator(world.transport(1)) as other, pytest.raises(RemoteError, match="rank 0 of 2 closed"):
        other.all_reduce(torch.ones(3))


def test_close_while_another_thread_is_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microddp.calls.CLOSE_GRACE_S", 0.2)
    world = ThreadWorld(2)
    comm = Communicator(world.transport(0))
    errors: list[BaseException] = []
    began = threading.Event()
    load = comm._collectives.all_reduce

    def enter(*args: Any) -> Any:
        began.set()
        return load(*args)

    monkeypatch.setattr(comm._collectives, "all_reduce", enter)

    def call() -> None:
        try:
            comm.all_reduce(torch.ones(3))
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert began.wait(5)
    comm.close()
    thread.join(5)
    assert not thread.is_alive() and len(errors) == 1
    with Communicator(world.transport(1)) as other, pytest.raises(RemoteError, match="with a collective pending"):
        other.all_reduce(torch.ones(3))


def test_async_calls_of_a_world_of_one() -> None:
    with microddp.init() as comm:
        x = torch.ones(3)
        assert comm.all_reduce(x, async_op=True).wait() is x
        assert comm.all_gather(x, async_op=True).wait().tolist() == [1.0] * 3

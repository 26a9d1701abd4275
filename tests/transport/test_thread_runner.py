"""``run_thread_ranks``: results in rank order, the first cause raised, no thread left behind."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator

import pytest
import torch

from microddp.errors import CollectiveTimeoutError, RemoteError, TransportError
from microddp.transport import thread as thread_module
from microddp.transport.thread import ThreadTransport, run_thread_ranks
from tests.transport.contract_tools import DEADLINE_S, exchange, poison, recv, send
from tests.transport.thread_tools import no_thread_left

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def waits_for(transport: ThreadTransport, peer: int) -> None:
    with exchange(transport) as opened:
        opened.wait(opened.post([recv(peer, poison(1))]))


def test_results_are_in_rank_order() -> None:
    """The last rank returns first."""

    def body(transport: ThreadTransport) -> str:
        rank = transport.rank
        with exchange(transport) as opened:
            if rank + 1 < transport.world_size:
                opened.wait(opened.post([recv(rank + 1, poison(1))]))
            if rank:
                opened.wait(opened.post([send(rank - 1, torch.ones(1))]))
        return f"rank {rank} on {threading.current_thread().name}"

    assert run_thread_ranks(body, 3) == [f"rank {rank} on microddp-rank-{rank}" for rank in range(3)]


@pytest.mark.parametrize(
    ("world_size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError), (True, TypeError)]
)
def test_world_size_must_be_a_positive_int(world_size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="world_size must be"):
        run_thread_ranks(lambda transport: None, world_size)


def test_the_first_cause_is_raised_with_its_traceback_and_the_rest_as_notes() -> None:
    def reads_a_file() -> None:
        raise FileNotFoundError("no shard 2")

    def body(transport: ThreadTransport) -> None:
        if transport.rank == 2:
            with exchange(transport):
                reads_a_file()
        waits_for(transport, (transport.rank + 1) % 4)

    with pytest.raises(FileNotFoundError, match="no shard 2") as caught:
        run_thread_ranks(body, 4)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "reads_a_file"
    text = notes(caught.value)
    assert text.startswith("raised on rank 2")
    for rank in (0, 1, 3):
        assert f"rank {rank} raised RemoteError: rank {rank}, " in text


def test_notes_without_add_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Python 3.10, where exceptions have no ``add_note``."""
    monkeypatch.setattr(thread_module, "hasattr", lambda *_: False, raising=False)

    def body(transport: ThreadTransport) -> None:
        if transport.rank == 0:
            raise KeyError("a")
        waits_for(transport, 0)

    with pytest.raises(KeyError) as caught:
        run_thread_ranks(body, 2)
    assert notes(caught.value).startswith("raised on rank 0\nrank 1 raised RemoteError: ")


def test_a_rank_that_only_passes_on_a_remote_error_is_not_the_cause() -> None:
    """Rank 0 sees the failure of rank 1 first; what rank 1 raises comes later, and is the cause."""
    seen = threading.Event()

    def body(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            transport.abort(LookupError("early warning"))
            assert seen.wait(DEADLINE_S)
            raise LookupError("the cause")
        try:
            waits_for(transport, 1)
        except RemoteError:
            seen.set()
            raise

    with pytest.raises(LookupError, match="the cause"):
        run_thread_ranks(body, 2)


def test_a_rank_that_returns_early_is_named() -> None:
    def body(transport: ThreadTransport) -> None:
        if transport.rank != 1:
            waits_for(transport, 1)

    with pytest.raises(TransportError, match="waiting for rank 1 in .*rank 1 closed its transport"):
        run_thread_ranks(body, 3)


def test_system_exit_of_a_rank_ends_all() -> None:
    def body(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            raise SystemExit(3)
        waits_for(transport, 1)

    with pytest.raises(SystemExit) as caught:
        run_thread_ranks(body, 2)
    assert caught.value.code == 3


def test_keyboard_interrupt_aborts_and_joins() -> None:
    """What ranks had raised before is not lost."""
    errors: list[BaseException] = []
    others_run = threading.Event()

    def body(transport: ThreadTransport) -> None:
        if transport.rank == 0:
            others_run.wait(DEADLINE_S)
            os.kill(os.getpid(), signal.SIGINT)
        elif transport.rank == 2:
            others_run.set()
        try:
            waits_for(transport, (transport.rank + 1) % 3)
        except BaseException as error:
            errors.append(error)
            raise

    with pytest.raises(KeyboardInterrupt) as caught:
        run_thread_ranks(body, 3)
    assert [type(error) for error in errors] == [RemoteError] * 3
    for rank in range(3):
        assert f"rank {rank} raised RemoteError: rank {rank}, " in notes(caught.value)
    assert all("KeyboardInterrupt" in str(error) for error in errors)


def test_a_timeout_names_the_ranks_that_still_run() -> None:
    def body(transport: ThreadTransport) -> None:
        if transport.rank != 1:
            waits_for(transport, 2 - transport.rank)

    with pytest.raises(CollectiveTimeoutError, match=r"rank 0, 2 of 3 still running after 0.2 s") as caught:
        run_thread_ranks(body, 3, timeout=0.2)
    assert "rank 2 raised RemoteError: rank 2, waiting for rank 0" in notes(caught.value)


def test_a_rank_stuck_in_its_own_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "GRACE_S", 0.05)
    release, ended = threading.Event(), threading.Event()

    def body(transport: ThreadTransport) -> None:
        release.wait(DEADLINE_S)
        ended.set()

    before = set(threading.enumerate())
    with pytest.raises(CollectiveTimeoutError, match="still running") as caught:
        run_thread_ranks(body, 1, timeout=0.05)
    assert "the thread of rank 0 did not end" in notes(caught.value)
    release.set()
    assert ended.wait(DEADLINE_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)


def test_threads_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that did start are aborted and joined."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "microddp-rank-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_thread_ranks(lambda transport: waits_for(transport, 2), 3)

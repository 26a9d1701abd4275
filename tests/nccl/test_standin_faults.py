"""The stand-in for NCCL when something goes wrong: who blocks, who is told, what an abort ends, what is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from tests.nccl.build import REPOSITORY
from tests.nccl.standin_tools import AtEnd, failing, num_descriptors, ring_step, run_ranks

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

SYSTEM_ERROR, INVALID_USAGE, REMOTE_ERROR = 2, 5, 6
AT_ONCE_S = 2.0  # with room for a busy machine
BLOCKED_S = 0.1  # what has not ended by then is taken to be blocked


@pytest.mark.parametrize("connected", [False, True], ids=["first use", "connected"])
def test_an_ungrouped_ring_blocks_and_an_abort_ends_it(connected: bool) -> None:
    """Everybody sends before anybody receives: each waits for its reader, and would for ever."""
    from cupy.cuda import nccl

    world_size = 3
    blocked = threading.Barrier(world_size)

    def body(communicator: Any, rank: int) -> int:
        ours = torch.zeros(8)
        if connected:
            ring_step(communicator, rank, world_size, ours, torch.empty(8))
        sender = AtEnd(
            lambda: communicator.send(ours.data_ptr(), 32, nccl.NCCL_UINT8, (rank + 1) % world_size, 0),
        )
        assert not sender.ended(BLOCKED_S)
        blocked.wait()
        communicator.abort()
        assert sender.ended(AT_ONCE_S)
        assert isinstance(sender.error, nccl.NcclError)
        return int(sender.error.status)

    # Who is not the first to abort may learn of the others' abort before its own.
    assert set(run_ranks(world_size, body)) <= {INVALID_USAGE, REMOTE_ERROR}


@pytest.mark.parametrize("ended_by", ["peer", "abort"])
def test_the_constructor_and_the_first_use_of_a_peer_wait_for_it(ended_by: str) -> None:
    from cupy.cuda import nccl

    unique_id = nccl.get_unique_id()
    early = AtEnd(lambda: nccl.NcclCommunicator(2, unique_id, 0))
    assert not early.ended(BLOCKED_S)
    late = nccl.NcclCommunicator(2, unique_id, 1)
    assert early.ended(AT_ONCE_S)
    communicator: Any = early.result
    ours, theirs = torch.arange(4.0), torch.zeros(4)
    sender = AtEnd(lambda: communicator.send(ours.data_ptr(), 16, nccl.NCCL_UINT8, 1, 0))
    assert not sender.ended(BLOCKED_S)
    if ended_by == "peer":
        late.recv(theirs.data_ptr(), 16, nccl.NCCL_UINT8, 0, 0)
        assert theirs.tolist() == [0, 1, 2, 3]
    else:
        communicator.abort()
    assert sender.ended(AT_ONCE_S)
    assert (sender.error is None) == (ended_by == "peer")
    communicator.abort()
    late.abort()


def test_who_waits_learns_that_a_rank_is_gone_whatever_it_waits_for() -> None:
    """A send and a receive that began before, and first uses of the peer that come after."""
    from cupy.cuda import nccl

    def body(communicator: Any, rank: int) -> list[int]:
        memory = torch.zeros(8, dtype=torch.uint8)
        if rank == 2:
            communicator.abort()
            return []
        call = communicator.send if rank == 0 else communicator.recv
        return [failing(lambda: call(memory.data_ptr(), 8, nccl.NCCL_UINT8, 2, 0))]

    assert run_ranks(3, body) == [[REMOTE_ERROR], [REMOTE_ERROR], []]


def test_the_death_of_a_process_is_reported_or_not_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nccl

    ids = [nccl.get_unique_id() for _ in range(3)]
    command = [sys.executable, "-m", "tests.nccl.standin_child", *(each.hex() for each in ids)]
    child = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        quiet, bounded, loud = (nccl.NcclCommunicator(2, each, 0) for each in ids)
        ping = torch.tensor(list(b"ping"), dtype=torch.uint8)
        for communicator in (quiet, bounded, loud):
            communicator.send(ping.data_ptr(), 4, nccl.NCCL_UINT8, 1, 0)
        assert child.stdout.readline() == "ready\n"
        monkeypatch.setenv("STANDIN_QUIET_DEATH", "1")
        waiting = AtEnd(lambda: quiet.send(ping.data_ptr(), 4, nccl.NCCL_UINT8, 1, 0))
        child.send_signal(signal.SIGKILL)
        child.wait()
        monkeypatch.setenv("STANDIN_TIMEOUT_MS", "200")
        assert failing(lambda: bounded.send(ping.data_ptr(), 4, nccl.NCCL_UINT8, 1, 0)) == SYSTEM_ERROR
        quiet.check_async_error()  # the death is not seen
        assert not waiting.ended(0)
        quiet.abort()
        assert waiting.ended(AT_ONCE_S) and isinstance(waiting.error, nccl.NcclError)
        monkeypatch.delenv("STANDIN_QUIET_DEATH")
        assert failing(lambda: loud.send(ping.data_ptr(), 4, nccl.NCCL_UINT8, 1, 0)) == REMOTE_ERROR
        for communicator in (bounded, loud):
            communicator.destroy()
    finally:
        child.kill()
        child.communicate()


def test_nothing_is_left_behind() -> None:
    """No socket and no thread, after a good end and after errors."""
    from cupy.cuda import nccl

    def good(communicator: Any, rank: int) -> None:
        ring_step(communicator, rank, 3, torch.zeros(100), torch.zeros(100))
        communicator.destroy()

    def bad(communicator: Any, rank: int) -> None:
        failing(lambda: communicator.send(8, 8 + rank, nccl.NCCL_UINT8, 3, 0))
        ring_step(communicator, rank, 3, torch.zeros(10 + rank), torch.zeros(10))

    before, threads = num_descriptors(), threading.active_count()
    run_ranks(3, good)
    with pytest.raises(nccl.NcclError):
        run_ranks(3, bad)
    assert num_descriptors() == before
    assert threading.active_count() == threads

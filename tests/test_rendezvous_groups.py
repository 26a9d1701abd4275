"""Ranks that find each other through a torch process group or an MPI communicator."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from microddp import rendezvous
from microddp.errors import TransportError
from microddp.rendezvous import gloo_from_mpi, store_from_mpi, store_from_process_group
from microddp.transport.gloo import GlooTransport
from tests.rendezvous_cases import gathered, process_groups
from tests.transport.gloo_pool import QUICK_NAMES, GlooPool, gloo_pools  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[1]
LIMIT_S = 30.0


def test_process_groups(gloo_pools: Callable[[int], GlooPool], tmp_path: Path) -> None:  # noqa: F811
    """Three processes: the default group, a subgroup given out of order, and one whose ranks have called unequally."""
    found = gloo_pools(3).run(process_groups, f"file://{tmp_path / 'store'}")
    outside = "this process, rank {} of the default group, is not in the group given"
    everybody = [[100, 101, 102], [0, 1, 2]]
    for rank in range(3):
        assert found[rank] == {
            "all": (rank, everybody),
            "unsorted": outside.format(1) if rank == 1 else ([0, 2].index(rank), [[100, 102], [0, 2]]),
            "pair": outside.format(0) if rank == 0 else ([1, 2].index(rank), [[101, 102], [1, 2]]),
        }


def test_there_is_no_process_group() -> None:
    with pytest.raises(ValueError, match="there is no process group: call torch.distributed.init_process_group"):
        store_from_process_group()


def test_a_process_group_made_again_over_the_same_store() -> None:
    """Its name and its ranks come again; the prefix does not."""
    store, found = HashStore(), []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            found += [store_from_process_group()[0] for _ in range(2)]
        finally:
            dist.destroy_process_group()
    for number, each in enumerate(found):
        each.set("key", str(number))
    assert [each.get("key") for each in found] == [b"0", b"1", b"2", b"3"]


class Board:
    """What the threads of a make-believe MPI share."""

    def __init__(self, world_size: int) -> None:
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=LIMIT_S)


class Comm:
    """mpi4py's communicator, as far as it is used, between threads."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._board.slots)

    def allgather(self, value: Any) -> list[Any]:
        self._board.slots[self._rank] = value
        self._board.barrier.wait()
        found = list(self._board.slots)
        self._board.barrier.wait()
        return found

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]


def on_ranks(world_size: int, body: Any) -> list[Any]:
    """``body(comm)`` on each rank: what it returned or raised."""
    board = Board(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = body(Comm(board, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


def all_gather_twice(comm: Comm) -> list[list[int]]:
    transports: list[GlooTransport] = [gloo_from_mpi(comm, timeout=LIMIT_S) for _ in range(2)]
    rank = comm.Get_rank()
    found = [gathered(transports[1], rank + 100), gathered(transports[0], rank)]
    for transport in transports:
        assert (transport.rank, transport.world_size) == (rank, comm.Get_size())
        transport.close()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_mpi_communicator(world_size: int) -> None:
    numbers = list(range(world_size))
    assert on_ranks(world_size, all_gather_twice) == [[[number + 100 for number in numbers], numbers]] * world_size


def test_what_goes_wrong_on_rank_0_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no port left")

    monkeypatch.setattr(rendezvous, "_mpi_servers", {})
    monkeypatch.setattr(rendezvous, "TCPStore", fail)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    for rank, error in enumerate(on_ranks(3, lambda comm: store_from_mpi(comm, timeout=5))):
        assert type(error) is TransportError
        assert str(error) == f"rank {rank} of 3: rank 0 cannot host a store on node7: OSError: no port left"


def test_a_rank_that_cannot_reach_the_store_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TCPStore

    def fail_on_rank_1(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.endswith(" for rank 1"):
            raise RuntimeError("no route to host")
        return real(*args, **kwargs)

    def body(comm: Comm) -> Any:
        threading.current_thread().name = f"rank {comm.Get_rank()}"
        return store_from_mpi(comm, timeout=5)

    monkeypatch.setattr(rendezvous, "TCPStore", fail_on_rank_1)
    for rank, error in enumerate(on_ranks(3, body)):
        assert type(error) is TransportError
        assert str(error).startswith(f"rank {rank} of 3: rank 1 did not reach the store at 127.0.0.1:")
        assert str(error).endswith(" within 5 s: RuntimeError: no route to host")


def test_the_host_of_rank_0_is_told_by_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    towards = {"node1": "127.0.0.1", "node2": "10.0.0.7"}
    monkeypatch.setattr(rendezvous, "address_towards", towards.get)
    assert rendezvous._host_towards(["node0", "node0"]) == "127.0.0.1"
    assert rendezvous._host_towards(["node0", "node1", "node2"]) == "10.0.0.7"
    assert rendezvous._host_towards(["node0", "node1"]) == "node0"
    assert rendezvous._host_towards(["node0", "unknown"]) == "node0"


def test_no_communicator() -> None:
    with pytest.raises(TypeError, match=r"int is not an mpi4py communicator, .*no Get_rank, Get_size, bcast"):
        store_from_mpi(3)


def test_real_mpi() -> None:
    """Only where mpi4py and mpirun are installed."""
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    program = """
from mpi4py import MPI
from tests.test_rendezvous_groups import all_gather_twice
print(all_gather_twice(MPI.COMM_WORLD), flush=True)
"""
    command = [mpirun, "-n", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **QUICK_NAMES, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[100, 101], [0, 1]]"] * 2

"""Short-lived rank processes that may die in any way: forked from a server that has torch loaded, in milliseconds."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.transport.gloo import GlooTransport
from tests.transport.gloo_pool import QUICK_NAMES

HOST = "127.0.0.1"
STRAGGLER_S = 3.0  # the last rank is taken for stopped if it says nothing for so long after all others
Body = Callable[..., Any]


@contextmanager
def fork_server() -> Iterator[None]:
    """Runs the server that the ranks are forked from; none of it is left afterwards."""
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", __name__])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK_NAMES.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def run_forks(
    body: Body, world_size: int, *args: Any, rank_0_hosts: bool = False, limit_s: float = 30.0
) -> list[tuple[Any, int | None]]:
    """``body(transport, *args)`` on each rank: (what it returned, None if it did not; exit code) by rank.

    A rank that has neither returned nor died when all others have, or after ``limit_s``, is killed.
    """
    store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, store.port, rank_0_hosts, theirs, body, args)
            process: BaseProcess = context.Process(target=_main, args=arguments)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        results = _receive(connections, time.monotonic() + limit_s)
        for rank in range(world_size):
            if rank not in results:
                processes[rank].kill()
        return [(results.get(rank), _exit_code(processes[rank])) for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(connections: list[Connection], deadline: float) -> dict[int, Any]:
    """What each rank has sent, None if it died; without the one that is silent long after all others are through."""
    results: dict[int, Any] = {}
    while len(results) < len(connections) and time.monotonic() < deadline:
        left = len(connections) - len(results)
        pending = [each for rank, each in enumerate(connections) if rank not in results]
        ready = wait(pending, STRAGGLER_S if left == 1 else deadline - time.monotonic())
        if left == 1 and not ready and len(connections) > 1:
            break
        for each in ready:
            assert isinstance(each, Connection)
            try:
                results[connections.index(each)] = each.recv()
            except EOFError:
                results[connections.index(each)] = None
    return results


def _exit_code(process: BaseProcess) -> int | None:
    process.join(5.0)
    return process.exitcode


def _main(
    rank: int, world_size: int, port: int, rank_0_hosts: bool, connection: Connection, body: Body, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = TCPStore(HOST, port, None, False, timeout=timedelta(seconds=20))
    if rank_0_hosts:
        if rank == 0:
            own = TCPStore(HOST, 0, None, True, wait_for_workers=False)
            store.set("port", str(own.port))
        else:
            own = TCPStore(HOST, int(store.get("port")), None, False, timeout=timedelta(seconds=20))
        store = own
    transport = GlooTransport(PrefixStore("forks", store), rank, world_size, timeout=20, address=HOST)
    connection.send(body(transport, connection, *args))

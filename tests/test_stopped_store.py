"""The process that hosts the ranks' store is stopped (SIGSTOP) before they have found each other: nobody hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.errors import TransportError
from microddp.rendezvous import store_from_environment, store_from_mpi, store_from_process_group
from microddp.transport.gloo import GlooTransport
from tests.conftest import settle
from tests.transport.gloo_pool import QUICK_NAMES

pytestmark = pytest.mark.timeout(60)

HOST = "127.0.0.1"
TIMEOUT_S = 0.5
LATE_S = 1.5  # after the timeout
PROGRAM = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A process that hosts a store, and its port."""
    with mock.patch.dict("os.environ", QUICK_NAMES):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process
            process.kill()


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """The host is stopped; it goes on afterwards, so that whatever still waits for it can end."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
        assert not settle(lambda: [each.name for each in threading.enumerate() if "microddp-bounded" in each.name], 20)


class LastRank:
    """Rank 1 of an MPI communicator whose rank 0 hosts its store on ``port``."""

    def __init__(self, port: int) -> None:
        self._port = port

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 2

    def allgather(self, value: Any) -> list[Any]:
        return [value, value]

    def bcast(self, value: Any, root: int) -> Any:
        return HOST, self._port, 0, ""


def from_environment(port: int, store: Any) -> object:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    with mock.patch.dict("os.environ", variables):
        return store_from_environment(TIMEOUT_S)


def from_process_group(port: int, store: Any) -> object:
    return store_from_process_group(None, TIMEOUT_S)


def from_mpi(port: int, store: Any) -> object:
    return store_from_mpi(LastRank(port), TIMEOUT_S)


def gloo(port: int, store: Any) -> object:
    return GlooTransport(PrefixStore("x", store), 1, 2, timeout=TIMEOUT_S, address=HOST)


@pytest.mark.parametrize("connect", [from_environment, from_process_group, from_mpi, gloo])
def test_a_store_whose_host_is_stopped(
    host: tuple[int, subprocess.Popen[str]], connect: Callable[[int, Any], object]
) -> None:
    port, process = host
    store = TCPStore(HOST, port, None, False, timeout=timedelta(seconds=20))
    if connect is from_process_group:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with stopped(process):
            began = time.monotonic()
            with pytest.raises(TransportError, match=r"rank \d.*the store, whose host may be stopped"):
                connect(port, store)
            assert time.monotonic() - began < TIMEOUT_S + LATE_S
    finally:
        if connect is from_process_group:
            dist.destroy_process_group()

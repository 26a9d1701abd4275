"""Ranks as threads of this process that may fail each in its own way, and what each came to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.transport.nccl import NcclTransport
from tests.nccl.faults_tools import HOST, LIMIT_S, new_server
from tests.nccl.standin_runtime import StandInRuntime
from tests.transport.gloo_pool import QUICK_NAMES

__all__ = ["Api", "Outcome", "expect", "run_threads", "set_up"]


@dataclass
class Outcome:
    """What a rank's thread came to: its error, if any, and the seconds it took."""

    error: BaseException | None
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s {type(self.error).__name__}: {self.error}"


def run_threads(ranks: Iterable[int], body: Callable[[int, Any], object]) -> dict[int, Outcome]:
    """``body(rank, store)`` on a thread for each of the ranks, which share a store."""
    with mock.patch.dict("os.environ", QUICK_NAMES):
        return _run_threads(ranks, body, new_server())


def _run_threads(ranks: Iterable[int], body: Callable[[int, Any], object], server: Any) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}

    def run(rank: int) -> None:
        began, failed = time.monotonic(), None
        try:
            body(rank, PrefixStore("faults", TCPStore(HOST, server.port, None, False)))
        except BaseException as error:
            failed = error
        outcomes[rank] = Outcome(failed, time.monotonic() - began)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for rank, outcome in sorted(outcomes.items()):
        print(f"rank {rank}: {outcome}")
    return dict(sorted(outcomes.items()))


class Api:
    """CuPy's module, for a test to change; counts the communicators that are asked for."""

    def __init__(self) -> None:
        from cupy.cuda import nccl

        self.nccl = nccl
        self.num_made = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nccl, name)

    def NcclCommunicator(self, *args: Any) -> Any:
        self.num_made += 1
        return self.nccl.NcclCommunicator(*args)


def set_up(store: Any, rank: int, world_size: int, *, timeout: float = LIMIT_S, **options: Any) -> NcclTransport:
    """A transport over the stand-in, whose host does not wait for its streams, as on a GPU."""
    if "runtime" not in options:
        options["runtime"] = StandInRuntime(blocking=False)
    return NcclTransport(store, rank, world_size, timeout=timeout, address=HOST, **options)


def expect(outcomes: dict[int, Outcome], kind: type[Exception], *texts: str, within: float) -> None:
    """Every rank has raised such an error, with all the texts, within so many seconds."""
    for outcome in outcomes.values():
        assert isinstance(outcome.error, kind), outcome
        for text in texts:
            assert text in str(outcome.error)
        assert outcome.seconds < within

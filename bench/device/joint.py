"""What the ranks of a world have in common: how they connect, and what they agree to do next."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import microddp
from bench.device.records import Context

__all__ = ["Agenda", "connect", "device_of", "prepare", "rank_and_size"]

Item = TypeVar("Item")

_RESERVE_S: Final = 1.5
_TIMEOUT_S: Final = 20.0
_MAX_FAILURES: Final = 2


def prepare(context: Context) -> None:
    """Imports what a rank needs, and makes the GPU's context, before the time starts. What fails fails again."""
    if context.stand_in:
        return
    with contextlib.suppress(Exception):
        for name in ("cupy", "cupy.cuda.nccl", "triton", "microddp_kernels.launchers.compiled"):
            importlib.import_module(name)
        torch.zeros(1, device="cuda")


def rank_and_size() -> tuple[int, int]:
    """This rank, and how many there are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def device_of(context: Context) -> torch.device:
    """Where the tensors are."""
    return torch.device("cpu") if context.stand_in else torch.device("cuda", 0)


def connect(context: Context) -> Any:
    """The communicator of this rank: over NCCL, or, on a stand-in, over Gloo."""
    timeout = max(min(_TIMEOUT_S, context.left()), 1.0)
    started = time.monotonic()
    if context.stand_in:
        comm = microddp.init("gloo", timeout=timeout)
    else:
        torch.cuda.set_device(0)
        options: dict[str, Any] = {"device": 0, "timeout": timeout}
        comm = microddp.init("nccl", **options)
    context.note("connected", {"seconds": time.monotonic() - started})
    return comm


class Agenda:
    """Takes all ranks through the same items until rank 0's time is up, and on after an item that fails.

    The ranks agree through the store, not through the communicator, which may be broken.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.rank, self.world_size = rank_and_size()
        seconds = max(context.left(), 1.0)
        client = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout=timedelta(seconds=seconds)
        )
        self._store = PrefixStore("agenda", client)
        self._failures = 0

    def run(self, items: Iterable[Item], name: Callable[[Item], str], call: Callable[[Any, Item], str]) -> int:
        """Calls ``call(comm, item)`` for each; it returns "" or what is wrong. Returns how many were done."""
        comm, count = connect(self._context), 0
        try:
            for number, item in enumerate(self._agreed(items)):
                title = name(item)
                self._context.step(title)
                wrong, is_broken = self._attempt(comm, item, call)
                self._context.check(title, not wrong, wrong)
                count += 1
                if self._anywhere(f"{number}/broken", is_broken):
                    comm = self._reconnected(comm)
        finally:
            comm.close()
        return count

    def _attempt(self, comm: Any, item: Item, call: Callable[[Any, Item], str]) -> tuple[str, bool]:
        try:
            return call(comm, item), False
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0], True

    def _reconnected(self, comm: Any) -> Any:
        self._failures += 1
        with contextlib.suppress(Exception):
            comm.close()
        if self._failures >= _MAX_FAILURES:
            raise RuntimeError("given up after two collectives that failed in flight")
        return connect(self._context)

    def _agreed(self, items: Iterable[Item]) -> Iterator[Item]:
        for number, item in enumerate(items):
            key = f"{number}/go"
            if self.rank == 0:
                self._store.set(key, "yes" if self._context.left() > _RESERVE_S else "no")
            if self._store.get(key) != b"yes":
                self._context.note("left out for lack of time", f"all from item {number} on")
                return
            yield item

    def _anywhere(self, key: str, here: bool) -> bool:
        """Whether it is so on any rank."""
        self._store.set(f"{key}/{self.rank}", "yes" if here else "no")
        return any(self._store.get(f"{key}/{rank}") == b"yes" for rank in range(self.world_size))

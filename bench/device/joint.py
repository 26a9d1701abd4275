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

__all__ = ["Agenda", "connect", "device_of", "prepare", "rank_and_size", "settle"]

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


@contextlib.contextmanager
def connect(context: Context) -> Iterator[Any]:
    """The communicator of this rank, closed at the end: over NCCL; without a device over its stand-in, or Gloo."""
    timeout = max(min(_TIMEOUT_S, context.left()), 1.0)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if context.stand_in:
            comm = stack.enter_context(_stand_in(context, timeout))
        else:
            torch.cuda.set_device(0)
            comm = microddp.init("nccl", device=0, timeout=timeout)
            stack.callback(comm.close)
        context.note("connected", {"seconds": time.monotonic() - started, "transport": comm.transport_name})
        yield comm


@contextlib.contextmanager
def _stand_in(context: Context, timeout: float) -> Iterator[Any]:
    """CuPy's bindings over the tests' stand-in for NCCL, and streams of the CPU; Gloo where that cannot be built."""
    try:
        from tests.nccl.build import load_standin
        from tests.nccl.standin_runtime import StandInRuntime

        load_standin()
    except (ImportError, RuntimeError, OSError) as error:
        context.note("no stand-in for NCCL", str(error))
        with microddp.init("gloo", timeout=timeout) as comm:
            yield comm
        return
    from microddp.rendezvous import store_from_environment
    from microddp.transport.nccl import NcclTransport

    runtime = StandInRuntime()
    try:
        transport = NcclTransport(*store_from_environment(timeout), timeout=timeout, runtime=runtime)
        with microddp.Communicator(transport, timeout=timeout) as comm:
            yield comm
    finally:
        runtime.close()


def settle(context: Context) -> None:
    """Waits until the device has done everything. The CPU's streams are waited for by each call."""
    if not context.stand_in:
        torch.cuda.synchronize()


class _BrokenError(Exception):
    """A collective failed on some rank: the communicator is of no more use."""


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

    def run(self, items: Iterable[Item], name: Callable[[Item], str], call: Callable[[Any, Item], str]) -> int:
        """Calls ``call(comm, item)`` for each; it returns "" or what is wrong. Returns how many were done."""
        todo = self._agreed(items)
        count, failures = 0, 0
        while failures < _MAX_FAILURES:
            with contextlib.suppress(_BrokenError), connect(self._context) as comm:
                for number, item in todo:
                    title = name(item)
                    self._context.step(title)
                    wrong, is_broken = self._attempt(comm, item, call)
                    self._context.check(title, not wrong, wrong)
                    count += 1
                    if self._anywhere(f"{number}/broken", is_broken):
                        raise _BrokenError
                return count
            failures += 1
        self._context.note("given up", f"after {failures} collectives that failed in flight")
        return count

    def _attempt(self, comm: Any, item: Item, call: Callable[[Any, Item], str]) -> tuple[str, bool]:
        try:
            return call(comm, item), False
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0], True

    def _agreed(self, items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
        for number, item in enumerate(items):
            key = f"{number}/go"
            if self.rank == 0:
                self._store.set(key, "yes" if self._context.left() > _RESERVE_S else "no")
            if self._store.get(key) != b"yes":
                self._context.note("left out for lack of time", f"all from item {number} on")
                return
            yield number, item

    def _anywhere(self, key: str, here: bool) -> bool:
        """Whether it is so on any rank."""
        self._store.set(f"{key}/{self.rank}", "yes" if here else "no")
        return any(self._store.get(f"{key}/{rank}") == b"yes" for rank in range(self.world_size))

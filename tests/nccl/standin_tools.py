"""Ranks as threads over the stand-in, by CuPy's own calls."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from microddp.device import DeviceRuntime
from tests.nccl.build import load_standin

__all__ = [
    "AtEnd",
    "bytes_of",
    "counters",
    "failing",
    "group",
    "last_error",
    "num_descriptors",
    "ring_step",
    "run_ranks",
]

Result = TypeVar("Result")
TIMEOUT_S = 20.0


class AtEnd:
    """A thread whose end is waited for, and what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def ended(self, timeout: float = TIMEOUT_S) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()


def run_ranks(world_size: int, body: Callable[[Any, int], Result]) -> list[Result]:
    """Calls ``body(communicator, rank)`` on a thread for each rank; raises the first error. Communicators are ended."""
    from cupy.cuda import nccl

    unique_id = nccl.get_unique_id()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    communicators: list[Any] = []

    def work(rank: int) -> None:
        try:
            communicator = nccl.NcclCommunicator(world_size, unique_id, rank)
            communicators.append(communicator)
            results[rank] = body(communicator, rank)
        except BaseException as error:
            errors.append(error)
            for each in communicators:  # or the others would wait for this rank
                each.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    alive = any(thread.is_alive() for thread in threads)
    for communicator in communicators:
        communicator.abort()
    if errors:
        raise errors[0]
    assert not alive, "a rank hangs"
    return results


@contextmanager
def group() -> Iterator[None]:
    """An NCCL group; ended whatever happens within."""
    from cupy.cuda import nccl

    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def ring_step(
    communicator: Any, rank: int, world_size: int, outgoing: torch.Tensor, incoming: torch.Tensor, stream: int = 0
) -> None:
    """Sends to the next rank and receives from the previous one, in one group."""
    from cupy.cuda import nccl

    with group():
        communicator.send(*_memory(outgoing), nccl.NCCL_UINT8, (rank + 1) % world_size, stream)
        communicator.recv(*_memory(incoming), nccl.NCCL_UINT8, (rank - 1) % world_size, stream)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def failing(call: Callable[[], object]) -> int:
    """The status of the NcclError that ``call`` must raise."""
    from cupy.cuda import nccl

    try:
        call()
    except nccl.NcclError as error:
        return int(error.status)
    raise AssertionError("nothing was raised")


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def counters(communicator: Any) -> list[int]:
    """Bytes sent, bytes received, messages sent, messages received."""
    totals = (ctypes.c_uint64 * 4)()
    assert load_standin().standin_counters(communicator.comm, totals) == 0
    return list(totals)


def last_error(communicator: Any) -> str:
    return str(load_standin().ncclGetLastError(communicator.comm).decode())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def recorded(runtime: DeviceRuntime, stream: Any) -> Any:
    """A new event, recorded on the stream."""
    event = runtime.new_event()
    runtime.record(event, stream)
    return event

"""Ranks whose callers work on streams, which tests hold up and let go, and look at without touching the host's time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from microddp import Communicator
from tests.nccl.injected_tools import Meeting
from tests.nccl.ranks_tools import Ranks, quick_switches, with_comms
from tests.nccl.standin_runtime import StandInRuntime

__all__ = ["NUMEL", "Device", "on_devices", "total"]

TIMEOUT_S = 20.0
NUMEL = 40


def total(world_size: int, factor: float = 1.0, numel: int = NUMEL) -> list[float]:
    """What an all-reduce makes of tensors that rank r has filled with (r + 1) * ``factor``."""
    return [factor * sum(range(1, world_size + 1))] * numel


class Device:
    """One rank's communicator and streams.

    Attributes:
        meet: returns when all ranks have called it.
    """

    def __init__(self, comm: Communicator, meet: Callable[[], None]) -> None:
        self.comm, self.meet = comm, meet
        self.runtime: StandInRuntime = comm._transport.runtime  # type: ignore[attr-defined]
        self.stream: Any = self.runtime.default

    @property
    def rank(self) -> int:
        return self.comm.rank

    @contextmanager
    def held(self, stream: Any = None) -> Iterator[threading.Event]:
        """Meanwhile a kernel on ``stream``, the caller's by default, waits; it ends when the event is set, or here."""
        gate = threading.Event()
        self.runtime.launch(stream or self.stream, lambda: gate.wait(TIMEOUT_S))
        try:
            yield gate
        finally:
            gate.set()

    def fill(self, x: torch.Tensor, value: float, stream: Any = None) -> None:
        """A kernel that fills ``x``."""
        self.runtime.launch(stream or self.stream, lambda: x.fill_(value))

    def look(self, x: torch.Tensor, stream: Any = None) -> list[torch.Tensor]:
        """What a kernel on ``stream`` finds in ``x``: in the list once it has run."""
        found: list[torch.Tensor] = []
        self.runtime.launch(stream or self.stream, lambda: found.append(x.clone()))
        return found

    def is_idle(self, stream: Any) -> bool:
        """Whether all that was enqueued on ``stream`` has run."""
        event = self.runtime.new_event()
        self.runtime.record(event, stream)
        return self.runtime.query(event)

    def finish(self) -> None:
        """Waits for all streams."""
        self.runtime.synchronize(TIMEOUT_S)


def on_devices(world_size: int, body: Callable[[Device], Any], **options: Any) -> Ranks:
    """Calls ``body(device)`` on a thread for each rank; raises what one raised."""
    meet = Meeting(world_size)

    def work(comm: Communicator) -> Any:
        try:
            return body(Device(comm, meet))
        except BaseException:
            meet.abort()
            raise

    options = {"make_runtime": partial(StandInRuntime, blocking=False), "slice_nbytes": 32, **options}
    with quick_switches():
        ranks = with_comms(world_size, work, **options)
    errors = [error for error in ranks.errors if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    ranks.checked()
    return ranks

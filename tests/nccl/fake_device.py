"""A device that runs nothing when it is told to: what is enqueued is kept, and played later in any legal order.

A ``FakeWorld`` holds the streams of all ranks; ``fake_play`` plays them. Tensors are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import torch

from microddp.device import DeviceRuntime, Event, Graph, Stream
from microddp.transport.base import Header, Kind, Transfer
from microddp.transport.stream import StreamExchange, StreamTransport, Ticket

__all__ = [
    "FakeEvent",
    "FakeGroup",
    "FakeKernel",
    "FakeRecord",
    "FakeRuntime",
    "FakeStream",
    "FakeStreamTransport",
    "FakeTicket",
    "FakeWait",
    "FakeWorld",
]


@dataclass(frozen=True, eq=False, slots=True)
class FakeKernel:
    """Something to do when its turn comes."""

    call: Callable[[], object]


@dataclass(frozen=True, eq=False, slots=True)
class FakeGroup:
    """Transfers that start together; the ``number``-th group of its rank."""

    transfers: tuple[Transfer, ...]
    number: int


@dataclass(frozen=True, eq=False, slots=True)
class FakeRecord:
    """Something that waits may refer to: one record of an event."""

    stream: FakeStream


@dataclass(frozen=True, eq=False, slots=True)
class FakeWait:
    """Nothing later starts before ``record``. An event that was never recorded keeps nothing waiting."""

    record: FakeRecord | None


FakeOperation = FakeKernel | FakeGroup | FakeRecord | FakeWait


@dataclass(eq=False, slots=True)
class FakeStream:
    """What was enqueued on one stream, in order."""

    rank: int
    name: str
    operations: list[FakeOperation] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.name}"


@dataclass(eq=False, slots=True)
class FakeEvent:
    """Refers to its last record, as a device's does."""

    last: FakeRecord | None = None


class FakeWorld:
    """The streams of ``world_size`` ranks.

    Attributes:
        streams: all of them, of all ranks, in the order in which they were made.
        played: the records that were reached the last time that the world was played.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.streams: list[FakeStream] = []
        self.played: set[FakeRecord] = set()

    def transports(self) -> list[FakeStreamTransport]:
        """One for each rank, each with a runtime of its own."""
        return [FakeStreamTransport(FakeRuntime(self, rank)) for rank in range(self.world_size)]

    def waits(self) -> list[FakeWait]:
        """Every wait that was enqueued, rank by rank and there in the order in which streams were made."""
        return [each for stream in self.streams for each in stream.operations if isinstance(each, FakeWait)]


class FakeRuntime(DeviceRuntime):
    """The streams of one rank.

    Attributes:
        caller: what ``caller_stream`` returns; the test may set another.
        waits: the waits of this rank in the order in which they were asked for.
    """

    device = torch.device("cpu")

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        self._numbers, self._groups = count(), count()
        self._current: list[FakeStream] = []
        self.waits: list[FakeWait] = []
        self.caller = self.new_stream()

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_stream(self) -> FakeStream:
        stream = FakeStream(self.rank, f"stream {next(self._numbers)}")
        self.world.streams.append(stream)
        return stream

    def caller_stream(self, array: Any = None) -> FakeStream:
        return self.caller

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def launch(self, stream: Stream, call: Callable[[], object]) -> None:
        """Raises RuntimeError outside ``on(stream)``, as a real launch would go to another stream there."""
        if not self._current or self._current[-1] is not stream:
            raise RuntimeError(f"{stream}: launched outside on(stream)")
        stream.operations.append(FakeKernel(call))

    def enqueue_group(self, stream: FakeStream, group: Sequence[Transfer]) -> None:
        """Enqueues transfers that start together, after all earlier groups of this rank, on whichever streams."""
        if not group:
            raise ValueError(f"{stream}: a group of no transfers")
        stream.operations.append(FakeGroup(tuple(group), next(self._groups)))

    def handle(self, stream: Stream) -> int:
        return self.world.streams.index(stream) + 1

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, event: Event, stream: Stream) -> None:
        event.last = FakeRecord(stream)
        stream.operations.append(event.last)

    def wait(self, stream: Stream, event: Event) -> None:
        self.waits.append(FakeWait(event.last))
        stream.operations.append(self.waits[-1])

    def query(self, event: Event) -> bool:
        return event.last is None or event.last in self.world.played

    def is_capturing(self, stream: Stream) -> bool:
        return False

    def capture(self, stream: Stream, enqueue: Callable[[], object]) -> Graph:
        raise RuntimeError("the fake device captures no graphs")


class FakeStreamTransport(StreamTransport):
    """Enqueues groups for the world to play."""

    name = "fake"

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(runtime.rank, runtime.world.world_size)
        self.runtime: FakeRuntime = runtime
        self.groups, self.kernels = runtime.new_stream(), runtime.new_stream()
        runtime.caller.name, self.groups.name, self.kernels.name = "caller", "groups", "kernels"

    def open(self, header: Header, deadline: float) -> FakeExchange:
        return FakeExchange(self)

    def prepare(self, edges: Sequence[tuple[int, bool]], deadline: float) -> None:
        """Has nothing to connect."""

    def reject(self, sequence: int, error: BaseException) -> None:
        """Tells nobody: ranks do not wait for each other on the host."""

    def abort(self, error: BaseException) -> None:
        """Has nothing to stop: the engine goes on to raise ``error``."""

    def close(self) -> None:
        """Has nothing to let go of."""


class FakeExchange(StreamExchange):
    """One collective."""

    def __init__(self, transport: FakeStreamTransport) -> None:
        self._transport = transport
        self._steps: set[int] = set()

    def enqueue(self, group: Sequence[Transfer]) -> None:
        for each in group:
            if each.kind is Kind.RECV_COMBINE:
                raise TypeError(f"rank {self._transport.rank}: a stream-ordered transport cannot {each.kind.value}")
            self._transport.counters.count(each)
            self._steps.add(each.step)
        self._transport.runtime.enqueue_group(self._transport.groups, group)

    def submit(self, done: FakeEvent, kept: object) -> FakeTicket:
        self._transport.counters.steps += len(self._steps)
        self._transport.counters.collectives += 1
        return FakeTicket(self._transport.runtime, done, kept)

    def post(self, group: Sequence[Transfer]) -> Sequence[Any]:
        self._refuse()

    def wait(self, events: Sequence[Any]) -> None:
        self._refuse()

    def finish(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(f"rank {self._transport.rank}: the host cannot wait for a device that is played afterwards")


@dataclass(eq=False)
class FakeTicket(Ticket):
    """Done when the world was played. Holds what must live until then."""

    runtime: FakeRuntime
    event: FakeEvent
    kept: object

    def done(self) -> bool:
        return self.runtime.query(self.event)

    def synchronize(self, timeout: float | None = None) -> None:
        """Raises TimeoutError if the world has not been played yet: nothing would run while the host waits."""
        if not self.done():
            raise TimeoutError(f"rank {self.runtime.rank}: the fake world has not been played")

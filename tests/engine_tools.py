"""What the engine's tests run it on: plans by name, a recorder, and a transport that is ordered by streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from microddp.engine import Engine
from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.schedule import schedule
from microddp.staging import StagingPool
from microddp.transport.base import Exchange, Header, Transfer, Transport
from microddp_kernels.launchers import launcher_for
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import CombineSpec, Values

CPU = torch.device("cpu")
PATIENCE_S = 20.0


def make_plan(name: str, rank: int, world_size: int, numel: int, *, order: str | None = None, **config: Any) -> Plan:
    """A plan for float32, hoisted unless ``is_hoisted=False``."""
    is_hoisted = config.pop("is_hoisted", True)
    config.setdefault("slice_nbytes", 64)
    plan = lower(schedule(name, world_size, order=order), rank, numel, 4, LoweringConfig(**config))
    return hoist(plan) if is_hoisted else plan


def run_sum(engine: Engine, plan: Plan, data: Values, sequence: int = 0, *, op: str = "sum", **options: Any) -> None:
    """One sum (or other ``op``) through ``engine``, on poisoned staging."""
    engine.pool.poison()
    header = Header(sequence, "all_reduce", "any", "sum", "float32", (plan.numel,), 0, 64)
    engine.run(plan, data, get_op(op), header, time.monotonic() + PATIENCE_S, **options)


def make_engine(transport: Transport, launcher: Launcher | None = None) -> Engine:
    return Engine(transport, launcher or launcher_for(CPU), StagingPool())


class Stream:
    """Runs what it is given, in order, on a thread of its own: what a device stream is to a host."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> threading.Event:
        """Enqueues ``task``; the event is set once it has run."""
        done = threading.Event()

        def run() -> None:
            task()
            done.set()

        self._tasks.put(run)
        return done

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self.error = error
                return


def await_all(events: Sequence[threading.Event]) -> None:
    for event in events:
        if not event.wait(PATIENCE_S):
            raise TimeoutError("an event of a stream was never set")


class StreamLauncher(Launcher):
    """Enqueues combines on the stream that it is given, as a device launcher does."""

    name = "stream"

    def __init__(self) -> None:
        self._eager = launcher_for(CPU)

    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec, queue: Any = None) -> Any:
        return queue.put(lambda: self._eager.combine(out, operands, how))

    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Any = None) -> Any:
        return queue.put(lambda: self._eager.copy(out, source))

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor], queue: Any = None) -> Any:
        return queue.put(lambda: self._eager.pack(out, sources))

    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor, queue: Any = None) -> Any:
        return queue.put(lambda: self._eager.unpack(outs, source))


class StreamTransport(Transport):
    """A host transport made stream-ordered: groups run on a stream, one after the other, as NCCL's do."""

    name = "stream"
    stream_ordered = True

    def __init__(self, host: Transport) -> None:
        super().__init__(host.rank, host.world_size)
        self.host, self.stream = host, Stream()
        self.groups: list[list[tuple[int, int]]] = []

    def open(self, header: Header, deadline: float) -> Exchange:
        return _StreamExchange(self, self.host.open(header, deadline))

    def reject(self, sequence: int, error: BaseException) -> None:
        self.host.reject(sequence, error)

    def abort(self, error: BaseException) -> None:
        self.host.abort(error)

    def close(self) -> None:
        self.stream.close()
        self.host.close()


class _StreamExchange(Exchange):
    def __init__(self, transport: StreamTransport, host: Exchange) -> None:
        self._transport, self._host = transport, host

    def post(self, group: Sequence[Transfer], after: Sequence[Any] = ()) -> Sequence[Any]:
        def run() -> None:
            await_all(after)
            self._host.wait(self._host.post(group))

        self._transport.groups.append([(each.step, each.peer) for each in group])
        return [self._transport.stream.put(run)] * len(group)

    def wait(self, events: Sequence[Any], queue: Any = None) -> None:
        queue.put(lambda: await_all(events))

    def finish(self) -> None:
        self._transport.stream.put(self._host.finish)

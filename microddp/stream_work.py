"""Collectives that a device does: to be awaited by a stream or by the host, and captured to be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from microddp import tracing
from microddp.device import Event, Graph, Stream
from microddp.errors import ClosedError, MicroddpError
from microddp.planner import Prepared
from microddp.stream_engine import Enqueued
from microddp.transport.base import Counters, Header
from microddp.transport.stream import StreamTransport, Ticket
from microddp.work import Work

__all__ = ["GraphedCollective", "StreamWork"]

Result = TypeVar("Result")


class StreamWork(Work[Result]):
    """A collective that was enqueued. Its tensors must not be touched until a stream or the host has waited."""

    def __init__(self, enqueued: Enqueued, array: Any, result: Result, what: str) -> None:
        super().__init__(None, what)
        self._enqueued, self._array, self._result = enqueued, array, result

    def done(self) -> bool:
        """Whether the device has ended it, well or not. Does not block."""
        return self._enqueued.ticket.done()

    def wait(self, timeout: float | None = None) -> Result:
        """Makes the caller's current stream wait, not the host, and returns the result.

        Args:
            timeout: if given, the host waits, at most so many seconds: ``synchronize``.

        Raises:
            TransportError: it is known to have failed.
        """
        if timeout is not None:
            return self.synchronize(timeout)
        self._enqueued.join(self._array)
        if self.done():
            self._enqueued.ticket.synchronize()
        return self._result  # type: ignore[return-value] # set in __init__

    def synchronize(self, timeout: float | None = None) -> Result:
        """See ``Work.synchronize``."""
        self._enqueued.join(self._array)
        self._enqueued.ticket.synchronize(timeout)
        return self._result  # type: ignore[return-value] # set in __init__

    def __repr__(self) -> str:
        return f"<Work {self._what}: {'ended' if self.done() else 'pending'}>"


Turn = Callable[[], AbstractContextManager[tuple[int, float]]]


class GraphedCollective(Generic[Result]):
    """A collective on a fixed tensor, captured into a graph: a replay costs the host one launch.

    Attributes:
        result: what the call would have returned: it holds the result of the latest replay.
    """

    def __init__(
        self,
        transport: StreamTransport,
        graph: Graph,
        prepared: Prepared,
        array: Any,
        result: Result,
        kept: object,
        moves: Counters,
        turn: Turn,
    ) -> None:
        """Args:
        kept: what the graph uses.
        moves: what each replay moves.
        turn: a context in which the communicator is this caller's: gives a sequence number and a deadline.
        """
        self.result = result
        self._transport, self._graph, self._prepared = transport, graph, prepared
        self._array, self._kept, self._turn = array, kept, turn
        self._moves = replace(moves, collectives=0)  # the exchange of a replay counts itself
        self._latest: Ticket | None = None
        self._is_closed = False

    def replay(self) -> Result:
        """Does the collective again with what the tensor holds when the caller's current stream comes to it.

        All ranks must replay it in the same order with their other collectives. Nothing waits on the host.

        Raises:
            ClosedError: this, or the communicator, was closed, or an earlier collective failed.
            RuntimeError: the caller's stream is being captured.
        """
        if self._is_closed:
            raise ClosedError("this graph was closed")
        transport = self._transport
        runtime = transport.runtime
        caller = runtime.caller_stream(self._array)
        if runtime.is_capturing(caller):
            raise RuntimeError("a graph cannot be replayed within a capture: capture the call itself")
        with self._turn() as (sequence, deadline), runtime.guard():
            header = self._prepared.header_of(sequence)
            with self._range(header):
                exchange = transport.open(header, deadline)
                try:
                    done = self._launch(caller)
                except BaseException as error:
                    transport.abort(error)
                    raise
                self._latest = exchange.submit(done, self)
            transport.counters.add(self._moves)
        return self.result

    def close(self) -> None:
        """Lets go of the graph and its memory, after the host has waited for the latest replay. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._latest is not None:
                with contextlib.suppress(MicroddpError):  # told to whoever synchronizes
                    self._latest.synchronize()
            self._graph.close()
            self._kept = None

    def _range(self, header: Header) -> AbstractContextManager[object]:
        """What a profiler shows of a replay: the whole, as the host enqueues no more than that."""
        tracer, prepared = tracing.current(), self._prepared
        if tracer is None:
            return contextlib.nullcontext()
        return tracer.collective(prepared.plan, header, prepared.op, prepared.types)

    def _launch(self, caller: Stream) -> Event:
        transport, runtime = self._transport, self._transport.runtime
        before, done = runtime.new_event(), runtime.new_event()
        runtime.record(before, transport.kernels)  # the collective before, which may have had another caller
        runtime.wait(caller, before)
        self._graph.launch(caller)
        runtime.record(done, caller)
        for stream in (transport.groups, transport.kernels):
            runtime.wait(stream, done)
        return done

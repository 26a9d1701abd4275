"""Plays a plan's stream program on a launcher and a stream-ordered transport. Knows no algorithm, and never waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from microddp import tracing
from microddp.device import DeviceRuntime, Event, Stream
from microddp.plan.instructions import Plan, Recv, RecvCombine, Send
from microddp.plan.streams import Group, Launch, Record, StreamName, StreamProgram, Wait, stream_program
from microddp.staging import LaneTypes, StagingPool
from microddp.transport.base import Header
from microddp.transport.stream import StreamExchange, StreamTransport, Ticket
from microddp.views import ProgramCache, Views
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.reduce_op import ReduceOp, Values

__all__ = ["Enqueued", "StreamEngine"]

_KEPT_PROGRAMS = 64

Step = tuple[Any, Any, Any]
"""(kind of operation, what it does, on what): a plain tuple, as each is gone through once a call."""


@dataclass(frozen=True, slots=True)
class _Actions:
    """A stream program with its views and events made.

    Attributes:
        edges: (peer, is a send) of all transfers.
        views: kept for the memory, of which groups know only the addresses.
    """

    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    edges: tuple[tuple[int, bool], ...]
    views: Views


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A collective that the device will do.

    Attributes:
        ticket: for the host: has it ended, has it failed.
        done: for streams: recorded after all of it.
        caller: the stream on which the caller worked when it was enqueued.
    """

    ticket: Ticket
    done: Event
    caller: Stream
    runtime: DeviceRuntime

    def join(self, array: Any = None) -> None:
        """Makes the stream on which the caller works on ``array`` now wait for the result."""
        runtime = self.runtime
        stream = runtime.caller_stream(array)
        runtime.wait(stream, self.done)
        if runtime.frees_in_order and stream == self.caller:
            self.ticket.release()  # what was allocated for the call was allocated on this stream


class StreamEngine:
    """Runs the plans of one rank on the streams of its transport.

    The views that a plan needs are made once for a tensor and kept while that tensor lives, at the same address.
    """

    def __init__(self, transport: StreamTransport, launcher: Launcher, pool: StagingPool) -> None:
        self.transport, self.launcher, self.pool = transport, launcher, pool
        self.programs: ProgramCache[_Actions] = ProgramCache(launcher, pool, self._actions)
        self._compiled: dict[tuple[int, int], StreamProgram] = {}
        self._captured: list[object] = []  # what graphs of the caller's use, which cannot tell when they are gone

    def run(
        self,
        plan: Plan,
        data: Values,
        op: ReduceOp | None,
        header: Header,
        deadline: float,
        *,
        types: tuple[LaneTypes, ...] | None = None,
        owner: torch.Tensor | None = None,
        store: Callable[[], object] | None = None,
        array: Any = None,
        keep: Callable[[object], object] | None = None,
    ) -> Enqueued:
        """Enqueues one collective: ``data`` (1-D, contiguous, ``plan.numel`` elements) will become the result.

        Starts after what the caller's stream has been given so far; nothing waits for it yet: see ``Enqueued.join``.
        If the caller's stream is being captured into a graph, so is the collective, with staging of its own.

        Args:
            plan, data, op, header, deadline, types, owner: as for ``Engine.run``.
            store: enqueues on torch's current stream what is still to be done with the result.
            array: what the caller passed, whose stream counts: a torch tensor or a CuPy array.
            keep: of a capture: is given what the graph uses; None: it is kept as long as this engine.

        Raises:
            TransportError: the ranks disagree, a peer failed or did not come when it was connected, or NCCL refused.
        """
        runtime = self.transport.runtime
        caller = runtime.caller_stream(array)
        is_captured = runtime.is_capturing(caller)
        tracer = tracing.current()
        with tracer.collective(plan, header, op, types) if tracer else contextlib.nullcontext() as trace:
            exchange = self.transport.open_captured(header) if is_captured else self.transport.open(header, deadline)
            try:
                lanes = data if isinstance(data, tuple) else (data,)
                if is_captured:
                    pool = StagingPool()
                    actions = self._actions(plan, self.programs.views(plan, lanes, op, types, pool))
                    (keep or self._captured.append)((actions, pool, lanes))
                else:
                    with runtime.on(self.transport.kernels):  # so that staging is given up in this stream's order
                        actions = self.programs.find(plan, lanes, op, types, owner)
                    self.transport.prepare(actions.edges, deadline)
                with runtime.guard(), runtime.on(self.transport.kernels):
                    done = self._play(exchange, actions, caller, store, trace)
                return Enqueued(exchange.submit(done, (lanes, actions, store)), done, caller, runtime)
            except BaseException as error:
                if is_captured:
                    self._rejoin(caller)
                self.transport.abort(error)
                raise

    def barrier(self, header: Header, deadline: float) -> None:
        """Waits on the host until all ranks are here, and what they have enqueued before has ended.

        Raises:
            TransportError: a rank failed, or did not come; or an earlier collective failed.
        """
        self.transport.synchronize(max(deadline - time.monotonic(), 0.0))
        self.transport.open(header, deadline).finish()

    def clear(self) -> None:
        """Forgets all views."""
        self.programs.clear()
        self._compiled.clear()
        self._captured.clear()

    def _rejoin(self, caller: Stream) -> None:
        """After a failure: a capture cannot be ended, by whoever began it, before its streams have come together."""
        runtime = self.transport.runtime
        with contextlib.suppress(RuntimeError):  # the capture is invalid, or the device has failed
            for stream in (self.transport.groups, self.transport.kernels):
                if runtime.is_capturing(stream):
                    event = runtime.new_event()
                    runtime.record(event, stream)
                    runtime.wait(caller, event)

    def _program(self, plan: Plan, num_lanes: int) -> StreamProgram:
        """Compiled once for a plan, also where its views are made anew for each call (of a CuPy array, say)."""
        found = self._compiled.get((id(plan), num_lanes))
        if found is None or found.plan is not plan:
            if len(self._compiled) >= _KEPT_PROGRAMS:
                self._compiled.pop(next(iter(self._compiled)))
            found = self._compiled[id(plan), num_lanes] = stream_program(plan, num_lanes=num_lanes)
        return found

    def _actions(self, plan: Plan, views: Views) -> _Actions:
        program = self._program(plan, views.num_lanes)
        steps: list[Step] = []
        for each in program.operations:
            if isinstance(each, Group):
                transfers = tuple(one for index in each.indices for one in views.transfers(plan.instructions[index]))
                steps.append((Group, self.transport.group(transfers), each.indices))
            elif isinstance(each, Launch):
                steps.append((Launch, views.call(plan.instructions[each.index]), each.index))
            else:
                steps.append((type(each), each.event, each.stream))
        events = tuple(self.transport.runtime.new_event() for _ in range(program.num_events))
        ends = (each for each in plan.instructions if isinstance(each, (Send, Recv, RecvCombine)))
        edges = dict.fromkeys((each.peer, isinstance(each, Send)) for each in ends)
        return _Actions(tuple(steps), events, tuple(edges), views)

    def _play(
        self,
        exchange: StreamExchange,
        actions: _Actions,
        caller: Stream,
        store: Callable[[], object] | None,
        trace: tracing.Trace | None,
    ) -> Event:
        transport = self.transport
        runtime, kernels, events = transport.runtime, transport.kernels, actions.events
        streams = {StreamName.CALLER: caller, StreamName.GROUPS: transport.groups, StreamName.KERNELS: kernels}

        def post(group: Any, indices: tuple[int, ...]) -> None:
            exchange.enqueue(group)

        def call(what: Callable[[], object], index: int) -> None:
            runtime.launch(kernels, what)

        enqueue, launch = (post, call) if trace is None else _traced(trace, post, call)
        for kind, what, where in actions.steps:
            if kind is Group:
                enqueue(what, where)
            elif kind is Launch:
                launch(what, where)
            elif kind is Record:
                runtime.record(events[what], streams[where])
            elif kind is Wait:
                runtime.wait(streams[where], events[what])
        done = runtime.new_event()
        if not actions.steps:  # nothing else has made the kernels' stream follow the caller's
            runtime.record(done, caller)
            runtime.wait(kernels, done)
            done = runtime.new_event()
        if store is not None:
            runtime.launch(kernels, store)
        runtime.record(done, kernels)
        return done


_Enqueue = Callable[[Any, tuple[int, ...]], None]
_Launch = Callable[[Callable[[], object], int], None]


def _traced(trace: tracing.Trace, enqueue: _Enqueue, launch: _Launch) -> tuple[_Enqueue, _Launch]:
    """Both within ranges of their own: of the host's time, as profilers show the device's beside it."""

    def enqueue_traced(group: Any, indices: tuple[int, ...]) -> None:
        with trace.group(indices, track="groups"):
            enqueue(group, indices)

    def launch_traced(call: Callable[[], object], index: int) -> None:
        with trace.kernel(index, track="kernels"):
            launch(call, index)

    return enqueue_traced, launch_traced

"""Named ranges of what an engine does, for profilers: NVTX, torch's profiler, and recorders in this process.

An engine asks ``current()`` once for each collective. Unless somebody listens that is None, and nothing else is done::

    tracer = tracing.current()
    if tracer is None:
        ...                                   # the plain path: no name is made
    else:
        with tracer.collective(plan, header, op, types) as trace:
            with trace.group(indices, track="groups"):
                ...                           # post, or enqueue, the transfers of these instructions
            with trace.kernel(index, track="kernels"):
                ...                           # launch what combines or copies

Who listens:

* NVTX, if ``MICRODDP_NVTX=1`` when this module is imported. Without that variable, if Nsight Systems started the
  process: ``NSYS_PROFILING_SESSION_ID`` is set, or ``NVTX_INJECTION64_PATH`` names its library. Never with
  ``MICRODDP_NVTX=0``.
* torch's profiler, while one is active in this process.
* whoever is within ``record()``.

Ranges begin and end on one thread each, so that they nest on every thread: the collective's on the caller's (or its
background thread), the others on the thread that plays the plan.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from torch.autograd import profiler as torch_profiler

from microddp.plan.instructions import Plan
from microddp.staging import LaneTypes
from microddp.tracing_names import Names, collective_name
from microddp.tracing_sinks import (
    Message,
    ProfilerSink,
    Recorded,
    Recorder,
    Sink,
    find_nvtx,
    nvtx_is_wanted,
)
from microddp.transport.base import Header
from microddp_kernels.reduce_op import ReduceOp

__all__ = [
    "COMBINES",
    "FUSED",
    "HOST",
    "TRANSFERS",
    "Message",
    "Recorded",
    "Recorder",
    "Trace",
    "Tracer",
    "current",
    "record",
]

HOST: Final = "host"
"""The track of what the host does: whole collectives, and waits."""

TRANSFERS: Final = "transfers"
"""The track of the groups of a host engine, from their start to their end."""

COMBINES: Final = "combines"
"""The track of a host engine's combines and copies."""

FUSED: Final = "fused combines"
"""The track of combines that are part of a receive, on whichever rank's thread moves the data."""

_KEPT_NAMES = 64


class _Range:
    """A range in all sinks and recorders. With no track recorders leave it out."""

    __slots__ = ("_name", "_rank", "_start_ns", "_tokens", "_tracer", "_track")

    def __init__(self, tracer: Tracer, name: str, rank: int, track: str | None) -> None:
        self._tracer, self._name, self._rank, self._track = tracer, name, rank, track
        self._tokens: list[tuple[Sink, Any]] = []
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()
        for sink in self._tracer.sinks:
            self._tokens.append((sink, sink.push(self._name)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._tokens:
            sink, token = self._tokens.pop()
            sink.pop(token)
        if self._track is not None and self._tracer.recorders:
            self._tracer.keep(Recorded(self._rank, self._track, self._name, self._start_ns, time.perf_counter_ns()))


class Tracer:
    """Somebody listens: begins and ends ranges for all who do.

    Attributes:
        sinks: of nested ranges.
        recorders: of everything.
    """

    def __init__(self, sinks: Sequence[Sink], recorders: Sequence[Recorder] = ()) -> None:
        self.sinks, self.recorders = tuple(sinks), tuple(recorders)

    def range(self, name: str, *, rank: int, track: str | None = HOST) -> _Range:
        """A context manager: the range lasts as long as it is entered, on this thread."""
        return _Range(self, name, rank, track)

    def collective(
        self, plan: Plan, header: Header, op: ReduceOp | None, types: tuple[LaneTypes, ...] | None = None
    ) -> Trace:
        """The ranges of one collective. Entered, it is itself the range of the whole.

        Args:
            types: of each lane; None if all buffers have the data's own type.
        """
        return Trace(self, plan, header, _names(plan, header, op, types))

    def keep(self, found: Recorded) -> None:
        """Tells the recorders of a range that is over."""
        for each in self.recorders:
            each.add(found)


class Trace:
    """One collective of one rank, as it is traced.

    Attributes:
        names: what its ranges are called.
        rank: whose it is.
    """

    def __init__(self, tracer: Tracer, plan: Plan, header: Header, names: Names) -> None:
        self.names, self.rank, self.header = names, plan.rank, header
        self._tracer = tracer
        self._whole = tracer.range(collective_name(header, plan.world_size), rank=plan.rank)

    def __enter__(self) -> Trace:
        self._whole.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.__exit__(kind, error, trace)

    @property
    def records(self) -> bool:
        """Whether anybody wants to know of ``keep``."""
        return bool(self._tracer.recorders)

    def group(self, indices: Sequence[int], track: str | None = TRANSFERS) -> _Range:
        """Around the start of the transfers that are these instructions of the plan."""
        return self._tracer.range(self.names.group(indices), rank=self.rank, track=track)

    def kernel(self, index: int, track: str | None = COMBINES) -> _Range:
        """Around the launch of one combine or copy; or of the combine of a RecvCombine."""
        return self._tracer.range(self.names.kernel(index), rank=self.rank, track=track)

    def wait(self, indices: Sequence[int], track: str | None = HOST) -> _Range:
        """Around a wait of the host for transfers."""
        return self._tracer.range(f"wait {self.names.group(indices)}", rank=self.rank, track=track)

    def range(self, name: str, track: str | None = HOST) -> _Range:
        """Around anything else."""
        return self._tracer.range(name, rank=self.rank, track=track)

    def keep(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        sends: tuple[Message, ...] = (),
        receives: tuple[Message, ...] = (),
    ) -> None:
        """Tells recorders of a range that nests with nothing, such as the flight of a group."""
        self._tracer.keep(Recorded(self.rank, track, name, start_ns, end_ns, sends, receives))


def current() -> Tracer | None:
    """What to tell of a collective that begins now; None, at hardly any cost, if nobody listens."""
    if _is_quiet and not _profiler_is_on():
        return None
    sinks = _always if not _profiler_is_on() else (*_always, ProfilerSink())
    recorders = tuple(_recorders)
    return Tracer(sinks, recorders) if sinks or recorders else None


@contextmanager
def record() -> Iterator[Recorder]:
    """Within it, the ranges of all ranks of this process, on all threads, are kept."""
    global _is_quiet
    recorder = Recorder()
    with _lock:
        _recorders.append(recorder)
        _is_quiet = False
    try:
        yield recorder
    finally:
        with _lock:
            _recorders.remove(recorder)
            _is_quiet = not (_always or _recorders)


def _profiler_is_on() -> bool:
    """Of the whole process; the public question answers for the calling thread only, and works run on others."""
    return bool(getattr(torch_profiler, "_is_profiler_enabled", False))


def _names(plan: Plan, header: Header, op: ReduceOp | None, types: tuple[LaneTypes, ...] | None) -> Names:
    """Kept by the plan's identity: comparing plans takes longer than naming them."""
    key = id(plan), header.algorithm, header.root, id(op), types
    with _lock:
        found = _kept_names.get(key)
        if found is None or found.plan is not plan or found.op is not op:
            if len(_kept_names) >= _KEPT_NAMES:
                _kept_names.pop(next(iter(_kept_names)))
            found = _kept_names[key] = Names.of(plan, header, op, types)
    return found


_lock = threading.Lock()
_kept_names: dict[Any, Names] = {}
_recorders: list[Recorder] = []
_nvtx = find_nvtx() if nvtx_is_wanted(os.environ) else None
_always: tuple[Sink, ...] = () if _nvtx is None else (_nvtx,)
_is_quiet = not _always

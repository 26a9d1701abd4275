"""A device runtime without a device: streams are threads, tensors are the CPU's, NCCL is the stand-in.

It keeps to CUDA's rules where a program could depend on them: a stream is ordered with no other but by events; an event
that was never recorded is complete; a wait is for the recording of its moment; what belongs to a capture can neither be
queried nor waited for outside of it, and the other way round; all that was captured must be joined when a capture ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from microddp.device import DeviceRuntime
from tests.nccl.standin_graph import Capture, StandInGraph
from tests.nccl.standin_streams import (
    HOST,
    Call,
    Captured,
    Host,
    Recording,
    StandInEvent,
    StandInStream,
    Work,
    install,
)

__all__ = ["HOST", "StandInRuntime"]

AnyStream = StandInStream | Host


def _add(stream: StandInStream, work: Work) -> None:
    if isinstance(stream.capture, Capture):
        stream.capture.add(stream, work)
    else:
        stream.enqueue(work)


class StandInRuntime(DeviceRuntime):
    """Streams and events of the CPU for one rank.

    With ``blocking``, a caller works on the host: its stream is ``HOST``, on which everything is complete at once, and
    which waits by blocking the calling thread. Otherwise it works on a stream as any other, ``default``. Within
    ``on(stream)`` it is that one.

    Attributes:
        errors: what calls raised on streams. Tests assert that there is nothing.
        failure: if set, ``query`` raises it, as everything does on a device that has failed.
    """

    device = torch.device("cpu")

    def __init__(self, *, blocking: bool = True) -> None:
        self.library = install(_add)
        self.errors: list[BaseException] = []
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._streams: list[StandInStream] = []
        self._graphs: list[StandInGraph] = []
        self._closed = False
        self._current = threading.local()
        self.default: AnyStream = HOST if blocking else self.new_stream()

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    # Streams.

    def new_stream(self) -> StandInStream:
        with self._lock:
            if self._closed:
                raise RuntimeError("the runtime was closed")
            stream = StandInStream(self.errors)
            self._streams.append(stream)
        return stream

    def caller_stream(self, array: Any = None) -> AnyStream:
        stack: list[AnyStream] = getattr(self._current, "stack", [])
        return stack[-1] if stack else self.default

    @contextmanager
    def on(self, stream: AnyStream) -> Iterator[None]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        self._current.stack.append(stream)
        try:
            yield
        finally:
            self._current.stack.pop()

    def launch(self, stream: AnyStream, call: Callable[[], object]) -> None:
        if isinstance(stream, Host):
            call()
        else:
            _add(stream, Call(call))

    def handle(self, stream: AnyStream) -> int:
        return stream.handle

    # Events.

    def new_event(self) -> StandInEvent:
        return StandInEvent()

    def record(self, event: StandInEvent, stream: AnyStream) -> None:
        if isinstance(stream, StandInStream) and isinstance(stream.capture, Capture):
            event.recording = stream.capture.record(stream)
        else:
            event.recording = self._record(stream)

    def _record(self, stream: AnyStream) -> Recording:
        if isinstance(stream, StandInStream):
            return stream.record()
        recording = Recording()
        recording.set()
        return recording

    def wait(self, stream: AnyStream, event: StandInEvent) -> None:
        """See ``DeviceRuntime.wait``; ``HOST`` waits by blocking.

        Raises:
            RuntimeError: one of both belongs to a capture to which the other does not.
        """
        recording = event.recording
        if isinstance(recording, Captured):
            self._wait_in_capture(stream, recording)
        elif recording is not None and self.is_capturing(stream):
            raise RuntimeError(
                f"{stream} is captured and cannot wait for an event that was recorded outside the capture"
            )
        elif recording is not None:
            self._wait(stream, recording)

    def _wait(self, stream: AnyStream, recording: Recording) -> None:
        if isinstance(stream, StandInStream):
            stream.wait(recording)
        else:
            recording.wait()

    def _wait_in_capture(self, stream: AnyStream, recording: Captured) -> None:
        capture = recording.capture
        if not isinstance(stream, StandInStream) or not isinstance(capture, Capture):
            raise RuntimeError(f"{stream} cannot wait for an event that was recorded in a capture")
        if capture.origin.capture is not capture:
            raise RuntimeError(f"{stream} cannot wait for an event of a capture that has ended")
        capture.wait(stream, recording)

    def query(self, event: StandInEvent) -> bool:
        if self.failure is not None:
            raise RuntimeError(f"the device failed: {self.failure}") from self.failure
        if isinstance(event.recording, Captured):
            raise RuntimeError("an event that was recorded in a capture cannot be queried")
        return event.recording is None or event.recording.done

    # Captures.

    def is_capturing(self, stream: AnyStream) -> bool:
        return isinstance(stream, StandInStream) and stream.capture is not None

    def capture(self, stream: AnyStream, enqueue: Callable[[], object]) -> StandInGraph:
        """See ``DeviceRuntime.capture``.

        Raises:
            RuntimeError: the stream is ``HOST`` or captured already, or work on another stream was not joined to it.
        """
        if not isinstance(stream, StandInStream):
            raise RuntimeError(f"{stream} cannot be captured")
        if stream.capture is not None:
            raise RuntimeError(f"{stream} is being captured already")
        capture = Capture(stream)
        try:
            with self.on(stream):
                enqueue()
            capture.check_joined()
        except BaseException:
            capture.free()
            raise
        finally:
            capture.end()
        graph = StandInGraph(capture, self.new_stream, self._record, self._wait)
        with self._lock:
            self._graphs.append(graph)
        return graph

    # Ends.

    def synchronize(self, timeout: float = 30.0) -> None:
        """Blocks until everything enqueued has run, and raises the first thing that a call raised.

        Raises:
            TimeoutError: names the streams that are stuck.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            pending = [(stream, stream.record()) for stream in self._streams]
        stuck = [stream for stream, each in pending if not each.wait(max(0.0, deadline - time.monotonic()))]
        if stuck:
            raise TimeoutError(f"not done after {timeout:g} s: {stuck}")
        if self.errors:
            raise self.errors[0]

    def close(self, timeout: float = 10.0) -> None:
        """Lets the streams do what is enqueued, and ends their threads and graphs. Idempotent.

        Raises:
            RuntimeError: a stream is stuck; abort the communicator that it waits for first.
        """
        with self._lock:
            self._closed = True
            graphs, self._graphs = self._graphs, []
            streams, self._streams = self._streams, []
        deadline = time.monotonic() + timeout
        stuck = [stream for stream in streams if not stream.close(deadline)]
        if stuck:
            raise RuntimeError(f"still at work after {timeout:g} s: {stuck}")
        for graph in graphs:
            graph.close()

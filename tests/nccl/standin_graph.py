"""Captured work on the CPU: what streams would have done, as nodes with dependencies, replayed on private streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from microddp.device import Graph
from tests.nccl.standin_streams import HOST, Captured, Host, Recording, StandInStream, Work

__all__ = ["Capture", "Node", "StandInGraph"]

CLOSE_S = 10.0


class Node:
    """One piece of captured work: where it was enqueued, and what must have run before it."""

    __slots__ = ("after", "stream", "work")

    def __init__(self, work: Work, stream: StandInStream, after: frozenset[Node]) -> None:
        self.work = work
        self.stream = stream
        self.after = after


class Capture:
    """Takes what is enqueued on a stream, and on every stream that waits for an event recorded in the capture."""

    def __init__(self, origin: StandInStream) -> None:
        self.origin = origin
        self.nodes: list[Node] = []
        self._last: dict[StandInStream, frozenset[Any]] = {}  # by stream: what comes before its next node
        self._join(origin, frozenset())

    def _join(self, stream: StandInStream, before: frozenset[Any]) -> None:
        if stream.capture not in (None, self):
            raise RuntimeError(f"{stream} is captured into another graph")
        stream.capture = self
        self._last[stream] = self._last.get(stream, frozenset()) | before

    def add(self, stream: StandInStream, work: Work) -> None:
        work.capture()
        node = Node(work, stream, self._last[stream])
        self.nodes.append(node)
        self._last[stream] = frozenset((node,))

    def record(self, stream: StandInStream) -> Captured:
        return Captured(self, self._last[stream])

    def wait(self, stream: StandInStream, recording: Captured) -> None:
        self._join(stream, recording.before)

    def end(self) -> None:
        """Gives the streams back. Does not check anything: see ``check_joined``."""
        for stream in self._last:
            stream.capture = None

    def check_joined(self) -> None:
        """Raises RuntimeError if something captured is not waited for by the stream on which the capture began."""
        joined: set[Node] = set()
        ahead = list(self._last[self.origin])
        while ahead:
            node = ahead.pop()
            if node not in joined:
                joined.add(node)
                ahead.extend(node.after)
        loose = {node.stream.handle for node in self.nodes if node not in joined}
        if loose:
            raise RuntimeError(
                f"work captured on streams {sorted(loose)} was not joined to stream {self.origin.handle}"
            )

    def free(self) -> None:
        for node in self.nodes:
            node.work.free()


class StandInGraph(Graph):
    """Replays a capture: each captured stream has a private one here, as a graph is ordered with no stream but its own.

    Args:
        capture: which has ended.
        new_stream: makes the private streams; they are closed by ``close``.
        record: as a runtime's, but the recording is returned.
        wait: as a runtime's, for a recording.
    """

    def __init__(
        self,
        capture: Capture,
        new_stream: Callable[[], StandInStream],
        record: Callable[[StandInStream | Host], Recording],
        wait: Callable[[StandInStream | Host, Recording], None],
    ) -> None:
        self._capture: Capture | None = capture
        self._record, self._wait = record, wait
        self._lanes = {stream: new_stream() for stream in dict.fromkeys(node.stream for node in capture.nodes)}
        # Those that another stream waits for; the order on one stream needs no recording.
        self._recorded = {each for node in capture.nodes for each in node.after if each.stream is not node.stream}

    @property
    def streams(self) -> Sequence[StandInStream]:
        return list(self._lanes.values())

    def launch(self, stream: StandInStream | Host) -> None:
        if self._capture is None:
            raise RuntimeError("the graph was closed")
        if stream is not HOST and isinstance(stream, StandInStream) and stream.capture is not None:
            raise RuntimeError("the stand-in does not capture the launch of a graph")
        start = self._record(stream)
        for lane in self._lanes.values():
            lane.wait(start)
        recordings: dict[Node, Recording] = {}
        for node in self._capture.nodes:
            lane = self._lanes[node.stream]
            for each in node.after:
                if each.stream is not node.stream:
                    lane.wait(recordings[each])
            lane.enqueue(node.work)
            if node in self._recorded:
                recordings[node] = lane.record()
        for end in [lane.record() for lane in self._lanes.values()]:
            self._wait(stream, end)

    def close(self) -> None:
        """See ``Graph.close``. Waits for a replay that still runs.

        Raises:
            RuntimeError: it did not end; abort the communicator first.
        """
        capture, self._capture = self._capture, None
        if capture is None:
            return
        deadline = time.monotonic() + CLOSE_S
        stuck = [lane for lane in self._lanes.values() if not lane.close(deadline)]
        if stuck:
            raise RuntimeError(f"a graph still runs: {stuck}")
        capture.free()

"""Streams and events of a device, behind one small interface: real ones, and those that tests inject.

What is enqueued on one stream runs in order. Two streams are ordered only by events: what is enqueued on a stream
after it was made to wait for an event starts after everything that was enqueued before the event was recorded.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.dlpack

__all__ = ["DeviceRuntime", "Event", "Graph", "Stream"]

Stream = Any  # a runtime's own kind of stream
Event = Any  # and of event


class Graph(ABC):
    """Work that was captured once, to be enqueued again and again as a whole."""

    @abstractmethod
    def launch(self, stream: Stream) -> None:
        """Enqueues all of it on ``stream``; may be called any number of times, not while it runs."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of it. Idempotent; must happen before the communicator whose transfers it holds is destroyed."""


class DeviceRuntime(ABC):
    """The streams and events of one device, as one rank uses them. Safe to call from several threads.

    Attributes:
        device: the one whose streams these are.
        frees_in_order: freed memory is not given out again before the stream that it was allocated on has come to
            where it was freed. So nothing needs to be kept that this stream waits for.
    """

    device: torch.device
    frees_in_order: bool = False

    @abstractmethod
    def guard(self) -> AbstractContextManager[None]:
        """Makes the device the calling thread's current one."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream that is ordered with no other, not even with the default stream."""

    @abstractmethod
    def caller_stream(self, array: Any = None) -> Stream:
        """The stream on which the calling thread works on ``array``: CuPy's for CuPy arrays, else torch's."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Within it, what torch does on this thread goes to ``stream``."""

    @abstractmethod
    def launch(self, stream: Stream, call: Callable[[], object]) -> None:
        """Enqueues what ``call`` does with tensors of the device on ``stream``. Used within ``on(stream)``.

        On a real device ``call`` is called at once, as it only enqueues; a stand-in calls it when its turn comes.
        """

    @abstractmethod
    def handle(self, stream: Stream) -> int:
        """The stream as NCCL takes it."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event that was not recorded yet. May be recorded again once what it stood for is no longer of interest."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Makes the event stand for everything enqueued on ``stream`` so far."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on ``stream`` from now on starts after ``event``. Does not block the host."""

    @abstractmethod
    def query(self, event: Event) -> bool:
        """Whether what the event stands for is complete. Never blocks.

        Raises:
            RuntimeError: the device failed.
        """

    @abstractmethod
    def is_capturing(self, stream: Stream) -> bool:
        """Whether what is enqueued on ``stream`` is being captured into a graph."""

    @abstractmethod
    def capture(self, stream: Stream, enqueue: Callable[[], object]) -> Graph:
        """Captures what ``enqueue`` enqueues on ``stream``, and on streams that join it, without running it."""

    def from_cupy(self, array: Any) -> torch.Tensor:
        """A tensor on the memory of a CuPy array without negative strides. Orders no streams.

        Raises:
            TypeError: torch has no such element type.
        """
        with self.on(self.caller_stream(array)):
            return torch.utils.dlpack.from_dlpack(array)

    def to_cupy(self, tensor: torch.Tensor) -> Any:
        """A CuPy array on the memory of a tensor."""
        return sys.modules["cupy"].from_dlpack(tensor)

    def identity(self) -> str:
        """What tells the device from every other one of its host; "" where several ranks may share it."""
        return ""

    def watch(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once by a thread that will only query events: that must not disturb a capture by another thread."""

"""Streams and events on the CPU: a stream is a thread with a queue, an event's recording is a flag that it sets."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from tests.nccl.build import load_standin

__all__ = ["HOST", "Batch", "Call", "Captured", "Host", "Recording", "StandInEvent", "StandInStream", "Work", "install"]

_numbers = itertools.count(1)  # handles are never given twice: NCCL's 0 is no stream of ours
_streams: dict[int, StandInStream] = {}  # those that are open, of every runtime in this process


class Host:
    """What stands for the caller's stream where the caller's work is done by the calling thread itself, at once."""

    handle = 0

    def __repr__(self) -> str:
        return "the host"


HOST = Host()


class Recording:
    """One recording of an event: set once all that was enqueued on its stream before has run."""

    __slots__ = ("_done", "done")

    def __init__(self) -> None:
        self.done = False
        self._done = threading.Lock()  # held until it is set: cheaper than a threading.Event, and as interruptible
        self._done.acquire()

    def set(self) -> None:
        self.done = True
        self._done.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks the calling thread until it is set; False if ``timeout`` seconds passed first."""
        if not self.done:
            if not self._done.acquire(timeout=-1 if timeout is None else timeout):
                return False
            self._done.release()  # for the next one who waits
        return True


class Captured:
    """A recording that belongs to a capture: the nodes that come before whatever waits for it."""

    __slots__ = ("before", "capture")

    def __init__(self, capture: object, before: frozenset[object]) -> None:
        self.capture = capture
        self.before = before


class StandInEvent:
    """Stands for its latest recording; for nothing before the first."""

    __slots__ = ("recording",)

    def __init__(self) -> None:
        self.recording: Recording | Captured | None = None


class Work(ABC):
    """What can be enqueued on a stream once, or captured and enqueued many times."""

    captured = False

    @abstractmethod
    def enqueued(self) -> Callable[[], object]:
        """Called on the host at each enqueuing, in issue order; returns what the stream does when its turn comes."""

    def capture(self) -> None:
        """Called instead of ``enqueued`` when it becomes part of a graph."""
        self.captured = True

    def free(self) -> None:  # noqa: B027 - most hold nothing
        """Called when it will not be enqueued again."""


class Call(Work):
    """A Python call that works with tensors, under the autograd mode of the thread that enqueues it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def enqueued(self) -> Callable[[], object]:
        return self._run

    def _run(self) -> None:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            self._call()


class Batch(Work):
    """The transfers of a group that the stand-in handed to a stream."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer
        self._library = load_standin()

    def enqueued(self) -> Callable[[], object]:
        place = self._library.standin_issue(self._pointer)
        return lambda: self._run(place)

    def _run(self, place: int) -> None:
        # Its failure is the communicator's asynchronous error; the stream goes on, as CUDA's does.
        self._library.standin_run(self._pointer, place)
        if not self.captured:
            self.free()

    def capture(self) -> None:
        super().capture()
        self._library.standin_captured(self._pointer)

    def free(self) -> None:
        if self._pointer:
            self._library.standin_free(self._pointer)
        self._pointer = 0


class StandInStream:
    """A thread that does what is enqueued, in order. What raises is kept in ``errors``, and it goes on.

    Attributes:
        handle: what NCCL takes for the stream.
        capture: the capture that takes what is enqueued instead, if any.
    """

    def __init__(self, errors: list[BaseException]) -> None:
        self.handle = next(_numbers)
        self.capture: object | None = None
        self._errors = errors
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        self._doing = "nothing"
        # A daemon, so that a stream that is stuck for good does not keep the interpreter from its end.
        self._thread = threading.Thread(target=self._work, name=f"stand-in stream {self.handle}", daemon=True)
        self._thread.start()
        _streams[self.handle] = self

    def __repr__(self) -> str:
        return f"stream {self.handle} (doing {self._doing})"

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            self._doing, call = task
            try:
                call()
            except BaseException as error:
                self._errors.append(error)
            self._doing = "nothing"
            del task, call  # or the tensors of the last call would live until the next

    def enqueue(self, work: Work) -> None:
        self._queue.put((type(work).__name__.lower(), work.enqueued()))

    def record(self) -> Recording:
        recording = Recording()
        self._queue.put(("a recording", recording.set))
        return recording

    def wait(self, recording: Recording) -> None:
        if not recording.done:
            self._queue.put(("a wait for an event", recording.wait))

    def close(self, deadline: float) -> bool:
        """Lets it do what is enqueued, then ends its thread; False if that did not happen before the deadline."""
        _streams.pop(self.handle, None)
        self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


def install(add: Callable[[StandInStream, Work], None]) -> ctypes.CDLL:
    """Makes the stand-in hand its groups to our streams, by ``add``. Returns the library."""
    library = load_standin()
    if not _hooks:

        def take(handle: int | None, pointer: int) -> int:
            stream = _streams.get(handle or 0)
            if stream is None:
                return 1  # not ours: the group runs within ncclGroupEnd
            add(stream, Batch(pointer))
            return 0

        _hooks.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(take))
        library.standin_set_enqueue(_hooks[0])
    return library


_hooks: list[object] = []  # keeps the one callback of this process alive

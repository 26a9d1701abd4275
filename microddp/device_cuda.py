"""CUDA streams, events and graphs, by torch; CuPy's current stream for CuPy arrays.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from microddp.device import DeviceRuntime, Graph
from microddp.errors import TransportError

__all__ = ["CudaRuntime"]

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaRuntime(DeviceRuntime):
    """The streams of one GPU. Its memory is torch's, whose allocator is ordered by streams.

    Raises:
        TransportError: there is no such device; the text says what is missing.
    """

    frees_in_order = True

    def __init__(self, device: torch.device | None = None) -> None:
        _check_cuda()
        found = device or torch.device("cuda")
        index = torch.cuda.current_device() if found.index is None else found.index
        if found.type != "cuda" or not 0 <= index < torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise TransportError(f"there is no device {device}: this process sees {count} CUDA devices, cuda:0 and on")
        self.device = torch.device("cuda", index)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """See ``DeviceRuntime.guard``."""
        with torch.cuda.device(self.device):
            yield

    def new_stream(self) -> torch.cuda.Stream:
        """A stream of high priority: what others wait for should not queue behind what they compute."""
        return torch.cuda.Stream(self.device, priority=-1)

    def caller_stream(self, array: Any = None) -> torch.cuda.Stream:
        """See ``DeviceRuntime.caller_stream``."""
        if type(array).__module__.partition(".")[0] == "cupy":
            # Asked by number: CuPy's way to switch devices could make a context on the one that it switches back to.
            pointer = sys.modules["cupy"].cuda.get_current_stream(self.device.index).ptr
            if pointer in (0, 1):  # both are CUDA's default stream; torch would make a new stream of a null pointer
                return torch.cuda.default_stream(self.device)
            return torch.cuda.ExternalStream(pointer, device=self.device)
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See ``DeviceRuntime.on``."""
        with torch.cuda.stream(stream):
            yield

    def launch(self, stream: torch.cuda.Stream, call: Callable[[], object]) -> None:
        """Calls it: ``stream`` is torch's current one."""
        call()

    def handle(self, stream: torch.cuda.Stream) -> int:
        """The ``cudaStream_t``."""
        pointer: int = stream.cuda_stream
        return pointer

    def new_event(self) -> torch.cuda.Event:
        """An event without timing, which costs less."""
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See ``DeviceRuntime.record``."""
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See ``DeviceRuntime.wait``."""
        stream.wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        """See ``DeviceRuntime.query``."""
        return bool(event.query())

    def is_capturing(self, stream: torch.cuda.Stream) -> bool:
        """Whether ``stream`` is in a capture: it is asked as the current one, the only one that torch tells about."""
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def capture(self, stream: torch.cuda.Stream, enqueue: Callable[[], object]) -> _CudaGraph:
        """See ``DeviceRuntime.capture``. Other threads may use the device meanwhile.

        The mode is "relaxed", since kernels may be loaded for the first time here: those for another alignment, say.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                enqueue()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture may be invalid: what was raised first says why
                    graph.capture_end()
                raise
            graph.capture_end()
        return _CudaGraph(graph)

    def identity(self) -> str:
        """The GPU's UUID, which other numberings of the devices do not change."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def watch(self) -> None:
        """Puts this thread's view of captures at "relaxed", so that its queries do not break those of other threads.

        torch has no call for that; without the driver's, graphs that a user captures in torch's default mode fail when
        a collective from before the capture is still running. The device becomes the thread's current one: a query
        could make a context on the first GPU else, which takes its memory.
        """
        with contextlib.suppress(RuntimeError):  # the queries will say so too
            torch.cuda.set_device(self.device)
        with contextlib.suppress(OSError, AttributeError):
            mode = ctypes.c_int(_RELAXED)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class _CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def launch(self, stream: torch.cuda.Stream) -> None:
        if self._graph is None:
            raise RuntimeError("this graph was closed")
        with torch.cuda.stream(stream):
            self._graph.replay()

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


def _check_cuda() -> None:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise TransportError(
            f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch (see pytorch.org), and "
            "beside it cupy-cuda13x nvidia-nccl-cu13 for CUDA 13, or cupy-cuda12x nvidia-nccl-cu12 for CUDA 12"
        )
    raise TransportError(
        f"torch {torch.__version__} finds no CUDA device: is there an NVIDIA GPU, is its driver recent enough for "
        f"CUDA {torch.version.cuda}, and does CUDA_VISIBLE_DEVICES ({_visible()}) name one?"
    )


def _visible() -> str:
    import os

    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "not set" if value is None else repr(value)

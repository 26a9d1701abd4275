"""Where the ranges of a trace go: NVTX, torch's profiler, and recorders in this process."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

__all__ = [
    "Message",
    "NvtxSink",
    "ProfilerSink",
    "Recorded",
    "Recorder",
    "Sink",
    "find_nvtx",
    "nvtx_is_wanted",
]

_log = logging.getLogger("microddp")

Message = tuple[int, int, int, int]
"""(sequence, sender, receiver, number): both ends of a message know it by the same tuple."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A range that is over. Times in nanoseconds of ``time.perf_counter_ns``, one clock for all processes of a machine.

    Attributes:
        rank: whose range.
        track: the row that it stands in.
        sends, receives: the messages that begin, and that end, in it.
    """

    rank: int
    track: str
    name: str
    start_ns: int
    end_ns: int
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


class Recorder:
    """Keeps the ranges of all ranks of this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._ranges: list[Recorded] = []

    @property
    def ranges(self) -> list[Recorded]:
        """Those that are over by now, by their start; an outer one before those within it."""
        return sorted(self._ranges, key=lambda each: (each.start_ns, -each.end_ns))

    def add(self, found: Recorded) -> None:
        """Keeps one."""
        self._ranges.append(found)


class Sink(ABC):
    """Where ranges go. ``push`` and the ``pop`` of what it returned come on the same thread, properly nested."""

    @abstractmethod
    def push(self, name: str) -> Any:
        """Begins a range."""

    @abstractmethod
    def pop(self, token: Any) -> None:
        """Ends it."""


class NvtxSink(Sink):
    """NVTX ranges of the calling thread."""

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._push, self._pop = push, pop

    def push(self, name: str) -> None:
        self._push(name)

    def pop(self, token: Any) -> None:
        self._pop()


class ProfilerSink(Sink):
    """Ranges of torch's profiler."""

    def push(self, name: str) -> torch_profiler.record_function:
        found = torch_profiler.record_function(name)
        found.__enter__()
        return found

    def pop(self, token: torch_profiler.record_function) -> None:
        token.__exit__(None, None, None)


def nvtx_is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables is to emit NVTX ranges; see the module."""
    wanted = environment.get("MICRODDP_NVTX", "")
    if wanted in ("0", "1"):
        return wanted == "1"
    if wanted:
        _log.warning("MICRODDP_NVTX=%r is neither 0 nor 1 and is ignored", wanted)
    # Some images set the injection path for CUPTI, which is no sign of Nsight: a range would load it for nothing.
    injected = os.path.basename(environment.get("NVTX_INJECTION64_PATH", ""))
    return bool(environment.get("NSYS_PROFILING_SESSION_ID")) or bool(injected and not injected.startswith("libcupti"))


def find_nvtx() -> Sink | None:
    """NVTX by torch, or by CuPy where torch was built without it; None, with a warning, where neither has it."""
    try:
        torch.cuda.nvtx.mark("microddp: ranges on")
        return NvtxSink(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    except RuntimeError as error:  # a build for CPUs
        reason = str(error)
    try:
        from cupy.cuda import nvtx
    except Exception as error:  # not there, or there without its libraries
        reason = f"{reason} CuPy: {error}"
    else:
        if nvtx.available:
            return NvtxSink(nvtx.RangePush, nvtx.RangePop)
    _log.warning("no NVTX ranges: %s", reason)
    return None

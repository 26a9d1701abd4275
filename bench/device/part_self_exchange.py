"""One rank sends to itself by CuPy's bindings of NCCL: the bytes, the order on a stream, a graph, and its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from bench.device.records import Context

__all__ = ["run"]

_DTYPES: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "int64", "int16", "uint8", "bool")
_NUMELS: Final = (1, 17, 4099, (1 << 22) + 3)
_POISON: Final = 0xA5
_SLEEP_CYCLES: Final = 50_000_000
"""About 25 ms."""


def run(context: Context) -> None:
    """Makes a communicator of one rank and uses it; each finding is a check of its own."""
    from cupy.cuda import nccl

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")  # the context that CuPy then shares
    context.step("communicator")
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    context.check("communicator of one rank", True)
    side = torch.cuda.Stream()
    kept: list[torch.cuda.CUDAGraph] = []
    steps: tuple[tuple[str, Callable[[Context, Any, torch.cuda.Stream, list[torch.cuda.CUDAGraph]], str]], ...] = (
        ("bytes on a stream of its own", _check_bytes),
        ("ordered on its stream", _check_order),
        ("captured and replayed", _check_graph),
        ("no asynchronous error", _check_error),
    )
    for name, step in steps:
        context.step(name)
        try:
            wrong = step(context, comm, side, kept)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        context.check(name, not wrong, wrong)
    context.step("destroy, graphs first")
    for graph in kept:
        graph.reset()
    kept.clear()
    comm.destroy()
    context.check("destroyed, graphs first", True)
    context.step("a second communicator")
    again = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    wrong = _check_bytes(context, again, side, kept, few=True)
    again.abort()
    context.check("a second communicator, aborted", not wrong, wrong)
    context.summary("self send and receive in one group by raw pointers; stream order; graph; destroy, then abort")


def exchange(comm: Any, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """Enqueues both ends in one group, as bytes."""
    from cupy.cuda import nccl

    nbytes = source.numel() * source.element_size()
    nccl.groupStart()
    try:
        comm.send(source.data_ptr(), nbytes, nccl.NCCL_UINT8, 0, stream)
        comm.recv(target.data_ptr(), nbytes, nccl.NCCL_UINT8, 0, stream)
    finally:
        nccl.groupEnd()


def _finished(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Whether the stream's work ends in time. The host is not blocked in a call that cannot be left."""
    event = torch.cuda.Event()
    event.record(stream)
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
    return True


def _check_bytes(
    context: Context, comm: Any, side: torch.cuda.Stream, kept: list[torch.cuda.CUDAGraph], few: bool = False
) -> str:
    """Random bytes of every type and size arrive; nothing around the target is written."""
    for name in _DTYPES[:1] if few else _DTYPES:
        dtype: torch.dtype = getattr(torch, name)
        for numel in _NUMELS[1:3] if few else _NUMELS:
            nbytes = numel * dtype.itemsize
            source = torch.randint(0, 2 if name == "bool" else 256, (nbytes,), dtype=torch.uint8, device="cuda")
            room = torch.full((nbytes + 512,), _POISON, dtype=torch.uint8, device="cuda")
            target = room[256 : 256 + nbytes]
            side.wait_stream(torch.cuda.current_stream())
            exchange(comm, target.view(dtype), source.view(dtype), side.cuda_stream)
            if not _finished(side, min(10.0, context.left())):
                return f"{name}[{numel}] did not end"
            around = torch.cat([room[:256], room[256 + nbytes :]])
            if not torch.equal(source, target) or not bool((around == _POISON).all()):
                return f"{name}[{numel}]: wrong bytes"
    return ""


def _check_order(context: Context, comm: Any, side: torch.cuda.Stream, kept: list[torch.cuda.CUDAGraph]) -> str:
    """What the stream has still to write is what is sent; the host has not waited for it."""
    source, target = torch.zeros(4099, device="cuda"), torch.zeros(4099, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_SLEEP_CYCLES)
        source.fill_(7.0)
        exchange(comm, target, source, side.cuda_stream)
        copied = target.clone()
    context.figure("host time to enqueue an exchange behind a busy stream", (time.perf_counter() - started) * 1e6, "us")
    if not _finished(side, min(10.0, context.left())):
        return "did not end"
    return "" if bool((copied == 7.0).all()) else f"{copied[:3].tolist()} arrived, not what was written before"


def _check_graph(context: Context, comm: Any, side: torch.cuda.Stream, kept: list[torch.cuda.CUDAGraph]) -> str:
    """A captured group sends what the source holds at each replay."""
    source, target = torch.zeros(4099, device="cuda"), torch.zeros(4099, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange(comm, target, source, torch.cuda.current_stream().cuda_stream)
    kept.append(graph)
    for value in (3.0, 4.0, 5.0):
        source.fill_(value)
        graph.replay()
        if not _finished(torch.cuda.current_stream(), min(10.0, context.left())):
            return f"replay with {value} did not end"
        if not bool((target == value).all()):
            return f"replay with {value} left {target[:3].tolist()}"
    return ""


def _check_error(context: Context, comm: Any, side: torch.cuda.Stream, kept: list[torch.cuda.CUDAGraph]) -> str:
    with contextlib.suppress(AttributeError):  # of an NCCL that has no such call
        comm.check_async_error()
    return ""

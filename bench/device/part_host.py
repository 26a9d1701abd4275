"""How long the host takes to enqueue an all-reduce of 4 KiB, with and without a graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

import microddp
from bench.device.joint import Agenda
from bench.device.records import Context, read_records
from bench.device.team import World, run_job

__all__ = ["job", "prepare", "run"]

_JOB: Final = "bench.device.part_host:job"
_NUMEL: Final = 1024
_BATCHES, _CALLS = 10, 8
"""So few at a time that no queue of the device fills up and blocks the host."""


def prepare(context: Context) -> list[World]:
    """Starts one rank, and two."""
    return [World(context, "host", _JOB, size) for size in (1, 2)]


def run(context: Context) -> None:
    """One rank alone, then two on one GPU, whose kernels take turns, but not on the host's time."""
    run_job(context, _JOB, (1, 2), context.prepared)
    figures = [each for each in read_records(context.path) if each["kind"] == "figure"]
    for size in (1, 2):
        found = [each for each in figures if each["name"].startswith(f"n={size}: ")]
        texts = [f"{each['name'].partition(': ')[2]} {each['value']:.0f}" for each in found]
        if texts:
            context.summary(f"n={size}, median us a call: {', '.join(texts)}")


def job(context: Context) -> None:
    """On each rank: torch.add for comparison, then every algorithm without and with a graph."""
    x, y = torch.zeros(_NUMEL, device="cuda"), torch.zeros(_NUMEL, device="cuda")
    names = microddp.algorithm_names("all_reduce")
    items = [("torch.add", ""), *((name, way) for name in names for way in ("", "graph"))]
    agenda = Agenda(context)
    agenda.run(items, lambda item: " ".join(item).strip(), lambda comm, item: _measure(context, comm, x, y, item))


def _measure(context: Context, comm: Any, x: torch.Tensor, y: torch.Tensor, item: tuple[str, str]) -> str:
    name, way = item
    if name == "torch.add":
        context.figure(name, _median_us(lambda: torch.add(x, x, out=y)), "us")
        return ""
    comm.all_reduce(x, algorithm=name)
    torch.cuda.synchronize()
    if not way:
        context.figure(name, _median_us(lambda: comm.all_reduce(x, algorithm=name)), "us")
        return ""
    captured = comm.capture_all_reduce(x, "sum", algorithm=name)
    try:
        context.figure(f"{name} by graph", _median_us(captured.replay), "us")
    finally:
        torch.cuda.synchronize()
        captured.close()
    return ""


def _median_us(call: Callable[[], object]) -> float:
    """Of the time in which a call returns; the device catches up between batches, unmeasured."""
    times = []
    for batch in range(_BATCHES):
        for _ in range(_CALLS):
            started = time.perf_counter()
            call()
            if batch:  # the first one warms up
                times.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6

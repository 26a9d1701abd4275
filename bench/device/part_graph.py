"""All-reduces in CUDA graphs: captured by the library, and by the user in ``torch.cuda.graph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

import microddp
from bench.device.joint import Agenda, device_of, settle
from bench.device.records import Context
from bench.device.team import World, run_job
from microddp.cli.bench_data import contribution, expected, num_wrong

__all__ = ["job", "prepare", "run"]

_JOB: Final = "bench.device.part_graph:job"
_NUMEL: Final = 100_003
_REPLAYS: Final = 4
_MODES: Final = {"user": "global", "user, of its thread": "thread_local"}
"""How a user's capture treats what other threads do meanwhile: torch's default, and the mild way."""


def prepare(context: Context) -> list[World]:
    """Starts two ranks."""
    return [World(context, "graph", _JOB, 2)]


def run(context: Context) -> None:
    """Two ranks; one, where two cannot share the GPU."""
    done = run_job(context, _JOB, (2,), context.prepared) or run_job(context, _JOB, (1,), [])
    what = f"{_REPLAYS} replays each, right after x changed, by the library and in torch.cuda.graph"
    context.summary(f"{what}: {', '.join(done) or 'not done'}")


def job(context: Context) -> None:
    """On each rank: every algorithm both ways."""
    names = microddp.algorithm_names("all_reduce")
    ways = ("library",) if context.stand_in else ("library", *_MODES)
    items = [(name, way) for way in ways for name in names]
    agenda = Agenda(context)
    agenda.run(items, lambda item: f"{item[0]} by the {item[1]}", lambda comm, item: _replayed(context, comm, item))


def _replayed(context: Context, comm: Any, item: tuple[str, str]) -> str:
    algorithm, way = item
    x = torch.zeros(_NUMEL, device=device_of(context))
    comm.all_reduce(x, algorithm=algorithm)  # connects, compiles and allocates: none of that may happen in a capture
    settle(context)
    if way == "library":
        captured = comm.capture_all_reduce(x, "sum", algorithm=algorithm)
        try:
            return _differs(comm, x, captured.replay)
        finally:
            settle(context)
            captured.close()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=_MODES[way]):
        comm.all_reduce(x, algorithm=algorithm)
    try:
        return _differs(comm, x, graph.replay)
    finally:
        torch.cuda.synchronize()
        graph.reset()


def _differs(comm: Any, x: torch.Tensor, replay: Callable[[], object]) -> str:
    """Replays on new contents each time, with nothing in between that waits."""
    for number in range(_REPLAYS):
        mine = contribution(comm.rank, _NUMEL, torch.float32, "sum") + number
        want = expected(comm.world_size, _NUMEL, torch.float32, "sum") + number * comm.world_size
        x.copy_(mine)
        replay()
        wrong = num_wrong(x.cpu(), want)
        if wrong:
            return f"replay {number}: {wrong} of {_NUMEL} elements wrong"
    return ""

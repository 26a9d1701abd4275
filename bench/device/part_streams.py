"""The caller's stream: what it has still to write is what is reduced, and memory freed early is not reused too soon."""

from __future__ import annotations

from typing import Any, Final

import torch

from bench.device.joint import Agenda
from bench.device.records import Context
from bench.device.team import World, run_job

__all__ = ["job", "prepare", "run"]

_JOB: Final = "bench.device.part_streams:job"
_NUMEL: Final = 65_537
_REPEATS: Final = 50
_SLEEP_CYCLES: Final = 2_000_000
"""About a millisecond."""

_OTHERS: Final = 100


def prepare(context: Context) -> list[World]:
    """Starts two ranks."""
    return [World(context, "streams", _JOB, 2)]


def run(context: Context) -> None:
    """Two ranks; one, where two cannot share the GPU."""
    done = run_job(context, _JOB, (2,), context.prepared) or run_job(context, _JOB, (1,), [])
    what = f"side stream behind a busy one, temporaries freed early, {_REPEATS} repeats"
    context.summary(f"{what}: {', '.join(done) or 'not done'}")


def job(context: Context) -> None:
    """On each rank."""
    calls = {
        "the caller's side stream": _side_stream,
        "the default stream": _default_stream,
        "temporaries freed early": _temporaries,
    }
    items = [(name, part) for part in range(5) for name in calls]
    # In five lots, so that what there is no time for is left out on all ranks together.
    Agenda(context).run(
        items, lambda item: f"{item[0]}, lot {item[1]}", lambda comm, item: calls[item[0]](comm, _REPEATS // 5)
    )


def _side_stream(comm: Any, repeats: int) -> str:
    """While the default stream is busy: zeros, a pause, this rank's number, the all-reduce, a copy of the result."""
    side = torch.cuda.Stream()
    torch.cuda._sleep(10 * _SLEEP_CYCLES)
    return _in_order(comm, repeats, side)


def _default_stream(comm: Any, repeats: int) -> str:
    return _in_order(comm, repeats, torch.cuda.current_stream())


def _in_order(comm: Any, repeats: int, stream: torch.cuda.Stream) -> str:
    third = torch.cuda.Stream()
    for number in range(repeats):
        want = sum(rank + 1 + number for rank in range(comm.world_size))
        with torch.cuda.stream(stream):
            x = torch.zeros(_NUMEL, device="cuda")
            torch.cuda._sleep(_SLEEP_CYCLES)
            x.fill_(comm.rank + 1 + number)
            comm.all_reduce(x)
            copied = x.clone()
        third.wait_stream(stream)
        with torch.cuda.stream(third):
            found = copied.cpu()
        wrong = int((found != want).sum())
        if wrong:
            return f"repeat {number}: {wrong} of {_NUMEL} elements are not {want}, such as {found[:3].tolist()}"
    return ""


def _temporaries(comm: Any, repeats: int) -> str:
    """The last reference to the tensor goes while it is reduced, and memory of its size is asked for and written."""
    for number in range(repeats):
        want = sum(rank + 1 + number for rank in range(comm.world_size))
        work = comm.all_reduce(torch.full((_NUMEL,), float(comm.rank + 1 + number), device="cuda"), async_op=True)
        others = [torch.full((_NUMEL,), -1.0, device="cuda") for _ in range(_OTHERS)]
        found = work.wait().cpu()
        del others
        wrong = int((found != want).sum())
        if wrong:
            return f"repeat {number}: {wrong} of {_NUMEL} elements are not {want}, such as {found[:3].tolist()}"
    return ""

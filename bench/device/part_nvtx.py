"""The ranges of an all-reduce as torch's profiler sees them, beside the GPU's kernels."""

from __future__ import annotations

from typing import Any, Final

import torch

from bench.device.joint import Agenda, device_of, settle
from bench.device.records import Context
from bench.device.team import World, run_job

__all__ = ["job", "prepare", "run"]

_JOB: Final = "bench.device.part_nvtx:job"
_NUMEL: Final = 1 << 20
_RANGE: Final = "microddp/"
_MAX_NAMES: Final = 40


def prepare(context: Context) -> list[World]:
    """Starts two ranks."""
    return [World(context, "nvtx", _JOB, 2)]


def run(context: Context) -> None:
    """Two ranks; one, where two cannot share the GPU."""
    done = run_job(context, _JOB, (2,), context.prepared) or run_job(context, _JOB, (1,), [])
    context.summary(f"ranges of all_reduce and its steps in torch's profiler: {', '.join(done) or 'not done'}")


def job(context: Context) -> None:
    """On each rank."""
    Agenda(context).run(["ranges"], str, lambda comm, item: _profiled(context, comm))


def _profiled(context: Context, comm: Any) -> str:
    """One all-reduce under the profiler."""
    x = torch.ones(_NUMEL, device=device_of(context))
    comm.all_reduce(x, algorithm="ring")
    settle(context)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [] if context.stand_in else [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        comm.all_reduce(x, algorithm="ring")
        settle(context)
    events = list(profile.events() or ())
    names = sorted({str(each.name) for each in events})
    ranges = [name for name in names if name.startswith(_RANGE)]
    on_gpu = sorted({str(each.name) for each in events if "CUDA" in str(getattr(each, "device_type", ""))})
    context.note("ranges", [name for name in names if not name.startswith("aten::")][:_MAX_NAMES])
    context.note("on the GPU", on_gpu[:_MAX_NAMES])
    context.check("a range of the whole all_reduce", any("all_reduce" in name for name in ranges), f"{names[:8]}")
    if comm.world_size > 1:
        steps = [name for name in names if "step" in name]
        context.check("ranges of its steps", bool(steps), f"none among {len(names)} names")
    return ""

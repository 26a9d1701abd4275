"""What each rank of ``microddp trace`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from microddp import tracing
from microddp.cli.bench_data import contribution
from microddp.cli.tensors import find_dtype
from microddp.cli.usage import load_algorithms
from microddp.communicator import Communicator
from microddp.transport.base import Transport

__all__ = ["RankTrace", "TracePlan", "run_traced"]

_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class TracePlan:
    """What to trace; plain data, as it travels to the ranks.

    Attributes:
        numel: elements of the tensor.
        slice_nbytes: bytes of a slice; None: the library chooses.
    """

    algorithm: str
    order: str | None
    numel: int
    dtype: str
    op: str
    slice_nbytes: int | None
    load: str | None

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.numel * find_dtype(self.dtype).itemsize

    def as_json(self) -> dict[str, Any]:
        """Plain data for the trace file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The ranges of one rank, and the slice size that it ran with."""

    ranges: Sequence[tracing.Recorded]
    slice_nbytes: int


def run_traced(plan: TracePlan, world_size: int, transport: str) -> list[RankTrace]:
    """Runs it on threads or processes; one trace for each rank, in rank order."""
    if transport == "thread":
        from microddp.transport.thread import run_thread_ranks

        return run_thread_ranks(lambda each: _trace_rank(each, plan), world_size)
    from microddp.processes import run_process_ranks

    return run_process_ranks(_trace_rank, world_size, args=(plan,))


def _trace_rank(transport: Transport, plan: TracePlan) -> RankTrace:
    load_algorithms(plan.load)
    with Communicator(transport, slice_nbytes=plan.slice_nbytes) as comm:
        source = contribution(comm.rank, plan.numel, find_dtype(plan.dtype), plan.op)
        work = source.clone()
        for _ in range(_WARM_UPS):  # views, connections and names are made once
            with tracing.record():
                comm.all_reduce(work.copy_(source), op=plan.op, algorithm=plan.algorithm, order=plan.order)
            comm.barrier()
        with tracing.record() as recorder:
            comm.all_reduce(work.copy_(source), op=plan.op, algorithm=plan.algorithm, order=plan.order)
        choice = comm.last_choice
        # Among threads a recorder hears of the other ranks too.
        ranges = tuple(each for each in recorder.ranges if each.rank == comm.rank)
        return RankTrace(ranges, choice.slice_nbytes if choice else 0)

"""Times all-reduce on one rank, as every rank of a benchmark does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from microddp.cli.bench_data import contribution, expected, num_wrong
from microddp.cli.output import Progress
from microddp.cli.tensors import find_dtype
from microddp.cli.usage import load_algorithms

if TYPE_CHECKING:
    from microddp.communicator import Communicator

__all__ = ["AUTO", "BenchPlan", "Measurement", "Row", "measure_all"]

AUTO = "auto"
"""Names no algorithm: the library chooses."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure; plain data, as it travels to the ranks."""

    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    op: str
    order: str | None
    warmup: int
    iters: int
    load: str | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way of calling it.

    Attributes:
        time_us: median over iterations of the slowest rank's time, in microseconds.
        algbw: size / time, in GB/s (1 GB = 10^9 bytes).
        busbw: algbw · 2(n-1)/n, for every algorithm alike.
        wrong: elements of the last timed result that are not exact, over all ranks.
    """

    time_us: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Row:
    """One size by one algorithm; ``chosen`` is what ran, which differs from ``algorithm`` for ``auto``."""

    algorithm: str
    chosen: str
    size: int
    count: int
    dtype: str
    op: str
    out_of_place: Measurement
    in_place: Measurement

    def as_json(self) -> dict[str, Any]:
        """Plain data with nccl-tests' names."""
        return asdict(self)


def measure_all(comm: Communicator, plan: BenchPlan) -> tuple[list[Row], int]:
    """Every size by every algorithm; the same rows on all ranks, and torch's threads on this one. Progress: rank 0."""
    load_algorithms(plan.load)
    rows = []
    with Progress("bench", len(plan.algorithms) * len(plan.sizes), enabled=comm.rank == 0) as progress:
        for algorithm in plan.algorithms:
            for size in plan.sizes:
                progress.step(f"{algorithm}, {size} bytes")
                rows.append(_measure(comm, plan, algorithm, size))
    return rows, torch.get_num_threads()


def _measure(comm: Communicator, plan: BenchPlan, algorithm: str, size: int) -> Row:
    dtype = find_dtype(plan.dtype)
    count = size // dtype.itemsize
    source = contribution(comm.rank, count, dtype, plan.op)
    want = expected(comm.world_size, count, dtype, plan.op)
    target = torch.empty_like(source)
    name = None if algorithm == AUTO else algorithm

    def out_of_place() -> None:
        comm.all_reduce(source, op=plan.op, algorithm=name, order=plan.order, out=target)

    def in_place() -> None:
        comm.all_reduce(target, op=plan.op, algorithm=name, order=plan.order)

    def spoil() -> None:  # a result that is not written shows
        target.fill_(True if dtype == torch.bool else 77)

    measured = []
    for call, prepare in ((out_of_place, spoil), (in_place, lambda: target.copy_(source))):
        times = _time(comm, plan, call, prepare)
        measured.append(_summary(comm, times, count * dtype.itemsize, num_wrong(target, want)))
    choice = comm.last_choice if name is None else None
    chosen = name or (choice.algorithm if choice else "")
    return Row(algorithm, chosen, count * dtype.itemsize, count, plan.dtype, plan.op, measured[0], measured[1])


def _time(comm: Communicator, plan: BenchPlan, call: Callable[[], None], prepare: Callable[[], object]) -> list[float]:
    """Seconds of each iteration on this rank; the calls block until their result is there."""
    times = []
    for number in range(plan.warmup + plan.iters):
        prepare()
        comm.barrier()
        start = time.perf_counter()
        call()
        stop = time.perf_counter()
        if number >= plan.warmup:
            times.append(stop - start)
    return times


def _summary(comm: Communicator, times: list[float], nbytes: int, wrong: int) -> Measurement:
    slowest = comm.all_reduce(torch.tensor(times, dtype=torch.float64), op="max")
    total_wrong = comm.all_reduce(torch.tensor([wrong]), op="sum")
    seconds = statistics.median(slowest.tolist())
    algbw = nbytes / seconds / 1e9 if seconds > 0 else 0.0
    n = comm.world_size
    return Measurement(seconds * 1e6, algbw, algbw * 2 * (n - 1) / n, int(total_wrong.item()))

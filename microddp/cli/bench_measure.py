"""Times all-reduce on one rank, as every rank of a benchmark does: ours, and torch's beside it if asked."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from microddp.cli.bench_compare import torch_all_reduce
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
    """What to measure; plain data, as it travels to the ranks.

    Attributes:
        load: a module or file that registers algorithms.
        compare: None, or the backend of torch whose all_reduce is timed in turn with ours.
    """

    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    op: str
    order: str | None
    warmup: int
    iters: int
    load: str | None
    compare: str | None = None


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
    """One size by one algorithm.

    Attributes:
        chosen: the algorithm that ran, which differs from ``algorithm`` for ``auto``.
        compared: torch's own all_reduce, in place, timed in turn with ours.
    """

    algorithm: str
    chosen: str
    size: int
    count: int
    dtype: str
    op: str
    out_of_place: Measurement
    in_place: Measurement
    compared: Measurement | None = None

    @property
    def ratio(self) -> float | None:
        """Torch's time over ours, both in place: above 1 ours is faster. None if it was not compared."""
        if self.compared is None or not self.in_place.time_us:
            return None
        return self.compared.time_us / self.in_place.time_us

    def as_json(self) -> dict[str, Any]:
        """Plain data with nccl-tests' names; what was not compared is left out."""
        found = asdict(self)
        if self.compared is None:
            del found["compared"]
            return found
        return {**found, "ratio": self.ratio}


def measure_all(comm: Communicator, plan: BenchPlan) -> tuple[list[Row], int]:
    """Every size by every algorithm; the same rows on all ranks, and torch's threads on this one. Progress: rank 0.

    Raises:
        UsageError: torch cannot do what it is to be compared in.
    """
    load_algorithms(plan.load)
    device = _device(comm)
    rows = []
    with contextlib.ExitStack() as stack:
        rival = None
        if plan.compare is not None:
            sample = contribution(comm.rank, 4, find_dtype(plan.dtype), plan.op).to(device)
            rival = stack.enter_context(torch_all_reduce(plan.compare, comm, plan.op, sample))
        total = len(plan.algorithms) * len(plan.sizes)
        progress = stack.enter_context(Progress("bench", total, enabled=comm.rank == 0))
        for algorithm in plan.algorithms:
            for size in plan.sizes:
                progress.step(f"{algorithm}, {size} bytes")
                rows.append(_measure(comm, plan, algorithm, size, device, rival))
    return rows, torch.get_num_threads()


def _device(comm: Communicator) -> torch.device:
    """Where this rank's tensors are; a GPU becomes torch's current one."""
    if comm.transport_name != "nccl":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way of calling it: what is timed, and what puts the tensors in order before."""

    call: Callable[[], object]
    prepare: Callable[[], object]


def _measure(
    comm: Communicator,
    plan: BenchPlan,
    algorithm: str,
    size: int,
    device: torch.device,
    rival: Callable[[torch.Tensor], None] | None,
) -> Row:
    dtype = find_dtype(plan.dtype)
    count = size // dtype.itemsize
    source = contribution(comm.rank, count, dtype, plan.op).to(device)
    want = expected(comm.world_size, count, dtype, plan.op)
    target = torch.empty_like(source)
    name = None if algorithm == AUTO else algorithm

    def out_of_place() -> None:
        comm.all_reduce(source, op=plan.op, algorithm=name, order=plan.order, out=target)

    def in_place() -> None:
        comm.all_reduce(target, op=plan.op, algorithm=name, order=plan.order)

    def spoil() -> None:  # a result that is not written shows
        target.fill_(True if dtype == torch.bool else 77)

    def fill() -> None:
        target.copy_(source)

    ways = [_Way(out_of_place, spoil), _Way(in_place, fill)]
    if rival is not None:
        ways.append(_Way(lambda: rival(target), fill))
    times, wrong = _alternate(comm, plan, ways, target, want)
    chosen = name or _choice(comm, in_place)
    nbytes = count * dtype.itemsize
    measured = [_summary(comm, each, nbytes, num, device) for each, num in zip(times, wrong)]
    return Row(algorithm, chosen, nbytes, count, plan.dtype, plan.op, *measured)


def _alternate(
    comm: Communicator, plan: BenchPlan, ways: Sequence[_Way], target: torch.Tensor, want: torch.Tensor
) -> tuple[list[list[float]], list[int]]:
    """Of each way, the seconds of its iterations on this rank, and the wrong elements after the last one.

    Every iteration does each way once, so that what disturbs one disturbs all. A call is over when its result is there.
    """
    times: list[list[float]] = [[] for _ in ways]
    wrong = [0] * len(ways)
    last = plan.warmup + plan.iters - 1
    for number in range(last + 1):
        for index, way in enumerate(ways):
            way.prepare()
            _settle(target.device)
            _meet(comm, target.device)
            start = time.perf_counter()
            way.call()
            _settle(target.device)
            stop = time.perf_counter()
            if number >= plan.warmup:
                times[index].append(stop - start)
            if number == last:
                wrong[index] = num_wrong(target.cpu(), want)
    return times, wrong


def _choice(comm: Communicator, call: Callable[[], object]) -> str:
    """The algorithm that the library chooses for this call."""
    call()
    choice = comm.last_choice
    return choice.algorithm if choice else ""


def _settle(device: torch.device) -> None:
    """Waits for the GPU; what is on the CPU is done when its call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _meet(comm: Communicator, device: torch.device) -> None:
    """All ranks go on from here at the same time, but for microseconds.

    Over NCCL a barrier asks a store, again and again, and lets ranks go milliseconds apart: what waits for the last
    one would be timed. What all GPUs have just done together ends at the same time.
    """
    comm.barrier()
    if device.type == "cuda":
        comm.all_reduce(torch.zeros(1, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)


def _summary(comm: Communicator, times: list[float], nbytes: int, wrong: int, device: torch.device) -> Measurement:
    slowest = comm.all_reduce(torch.tensor(times, dtype=torch.float64, device=device), op="max")
    total_wrong = comm.all_reduce(torch.tensor([wrong], device=device), op="sum")
    seconds = statistics.median(slowest.tolist())
    algbw = nbytes / seconds / 1e9 if seconds > 0 else 0.0
    n = comm.world_size
    return Measurement(seconds * 1e6, algbw, algbw * 2 * (n - 1) / n, int(total_wrong.item()))

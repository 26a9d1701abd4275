"""Compares microddp's all-reduce over Gloo with torch's own Gloo all_reduce, in the same processes, alternating.

``python bench/bench_all_reduce.py`` measures 2 and 4 processes, 4 KiB to 64 MiB of float32, in place. Each repeat runs
torch's and every candidate once, each after a barrier; a run's time is the slowest rank's; medians over the repeats.
The ratio is torch's time over ours: above 1 is faster than torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import microddp

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB * 4**power for power in range(8))
CANDIDATES = ("auto", "tree", "ring", "direct")
WARM_UP = 2

Times = dict[str, float]


def measure(
    comm: microddp.Communicator, path: str, sizes: Sequence[int], candidates: Sequence[str], seconds: float
) -> list[tuple[int, Times, str]]:
    """For each size the median seconds of each candidate (slowest rank), and what "auto" chose. Runs on every rank."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.world_size)
    rows = []
    try:
        for nbytes in sizes:
            tensor = torch.ones(nbytes // 4)
            times = _alternate(_runs(comm, tensor, candidates), tensor, seconds)
            comm.all_reduce(tensor)
            chosen = comm.last_choice
            rows.append((nbytes, times, chosen.algorithm if chosen else "?"))
            if comm.rank == 0:
                print(f"{comm.world_size} ranks, {nbytes} bytes: done", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()
    return rows


def _runs(
    comm: microddp.Communicator, tensor: torch.Tensor, candidates: Sequence[str]
) -> dict[str, Callable[[], object]]:
    runs: dict[str, Callable[[], object]] = {"torch": lambda: dist.all_reduce(tensor)}
    for name in candidates:
        algorithm = None if name == "auto" else name
        runs[name] = lambda algorithm=algorithm: comm.all_reduce(tensor, algorithm=algorithm)  # type: ignore[misc]
    return runs


def _alternate(runs: dict[str, Callable[[], object]], tensor: torch.Tensor, seconds: float) -> Times:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    repeats, number = 5, 0
    while number < repeats + WARM_UP:
        started_all = time.perf_counter()
        for name, run in runs.items():
            tensor.fill_(1)  # sums of sums would overflow
            dist.barrier()
            started = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - started)
        number += 1
        if number == WARM_UP:  # rank 0's clock decides for all how many repeats fit
            wanted = torch.tensor([min(200, max(5, int(seconds / (time.perf_counter() - started_all))))])
            dist.broadcast(wanted, 0)
            repeats = int(wanted)
    table = torch.tensor([samples[name][WARM_UP:] for name in runs], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return {name: statistics.median(row) for name, row in zip(runs, table.tolist())}


def _print_table(world_size: int, rows: list[tuple[int, Times, str]], candidates: Sequence[str]) -> None:
    print(f"\n{world_size} processes, float32 sum, in place, medians; ratio = torch's time / ours")
    print(
        f"{'size':>9} {'torch ms':>10}"
        + "".join(f" {name + ' ms':>10} {'ratio':>6}" for name in candidates)
        + "  auto is"
    )
    for nbytes, times, chosen in rows:
        size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
        cells = "".join(f" {times[name] * 1e3:10.3f} {times['torch'] / times[name]:6.2f}" for name in candidates)
        print(f"{size:>9} {times['torch'] * 1e3:10.3f}{cells}  {chosen}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="microddp against torch's Gloo all_reduce, in one run")
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], help="numbers of processes (default: 2,4)")
    parser.add_argument("--sizes", type=_numbers, default=list(SIZES), help="bytes, separated by commas")
    parser.add_argument("--candidates", default=",".join(CANDIDATES), help='algorithms, or "auto"')
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long to measure one size")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options = parser.parse_args()
    candidates = options.candidates.split(",")
    results = {}
    for world_size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            job = (os.path.join(folder, "store"), options.sizes, candidates, options.seconds)
            results[world_size] = microddp.run_processes(measure, world_size, args=job)[0]
        if not options.json:
            _print_table(world_size, results[world_size], candidates)
    if options.json:
        print(
            json.dumps({n: [{"nbytes": b, "seconds": t, "auto": c} for b, t, c in rows] for n, rows in results.items()})
        )


if __name__ == "__main__":
    main()

"""``microddp bench``: time and bandwidth of all-reduce, in nccl-tests' columns."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from microddp.cli.output import Column, Output, counted
from microddp.cli.usage import UsageError, integer, load_algorithms, parse_sizes, usage_errors

if TYPE_CHECKING:
    from microddp.cli.bench_measure import BenchPlan, Measurement, Row

__all__ = ["add_parser", "launched_ranks"]

_MAX_RANKS = 64
_WIDE = 110
_HEADERS = ("time\n(us)", "algbw\n(GB/s)", "busbw\n(GB/s)", "#wrong")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time all-reduce, in nccl-tests' columns",
        description="Times all-reduce out of place and in place on N local ranks, or, under torchrun, on its ranks. "
        "time is the median over the iterations of the slowest rank's time; algbw is size/time; busbw is "
        "algbw 2(n-1)/n for every algorithm alike; 1 GB is 10^9 bytes. #wrong counts elements that are not exactly "
        "what NumPy computes; any makes the exit status 1.",
    )
    parser.add_argument("--ranks", type=integer(1, _MAX_RANKS), metavar="N", help="number of ranks (4, or torchrun's)")
    parser.add_argument("--transport", choices=["gloo", "thread"], default="gloo", help="processes or threads (gloo)")
    parser.add_argument("--algorithms", metavar="NAMES", help="such as ring,tree,auto (all that are registered)")
    parser.add_argument("--sizes", default="4K:4M:x4", help="bytes: a list 4K,1M or a range 4K:64M:x4 (4K:4M:x4)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--op", default="sum", help="operator (sum)")
    parser.add_argument("--order", choices=["rank"], help="combine in rank order")
    parser.add_argument("--warmup", type=integer(0), default=3, help="iterations before the timed ones (3)")
    parser.add_argument("--iters", type=integer(1), default=10, help="timed iterations (10)")
    parser.add_argument("--load", metavar="MODULE", help="a module or .py file that registers algorithms")
    parser.add_argument("--json", action="store_true", help="the same as one JSON document")
    parser.set_defaults(run=run)


def launched_ranks(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world size) if torchrun, or something like it, started this process; else None.

    Raises:
        UsageError: the variables are no numbers.
    """
    rank, world_size = environment.get("RANK"), environment.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    try:
        return int(rank), int(world_size)
    except ValueError:
        raise UsageError(f"RANK={rank!r} and WORLD_SIZE={world_size!r} must be integers") from None


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    import microddp
    from microddp.cli.bench_measure import measure_all

    launched = launched_ranks(os.environ)
    world_size = _world_size(args, launched)
    load_algorithms(args.load)
    plan = _plan(args)
    if launched is not None:
        with usage_errors():
            comm = microddp.init("gloo")
        with comm:
            results = [measure_all(comm, plan)]
    else:
        start = microddp.run_threads if args.transport == "thread" else microddp.run_processes
        results = start(measure_all, world_size, args=(plan,))
    rows, num_threads = results[0]
    if launched is None or launched[0] == 0:
        _write(args, plan, rows, world_size, num_threads)
    wrong = sum(row.out_of_place.wrong + row.in_place.wrong for row in rows)
    if wrong and (launched is None or launched[0] == 0):
        sys.stderr.write(f"microddp bench: {counted(wrong, 'element')} wrong\n")
    return 1 if wrong else 0


def _world_size(args: argparse.Namespace, launched: tuple[int, int] | None) -> int:
    if launched is None:
        return int(args.ranks or 4)
    if args.ranks not in (None, launched[1]):
        raise UsageError(f"--ranks {args.ranks} does not fit the {launched[1]} ranks that were launched (WORLD_SIZE)")
    if args.transport != "gloo":
        raise UsageError("--transport thread has no meaning under torchrun, whose ranks are processes")
    return launched[1]


def _plan(args: argparse.Namespace) -> BenchPlan:
    from microddp.cli.bench_measure import AUTO, BenchPlan
    from microddp.cli.tensors import find_dtype
    from microddp.schedule import algorithm_names
    from microddp.schedule.registry import find_algorithm
    from microddp_kernels.operators import get_op

    names = tuple(each.strip() for each in args.algorithms.split(",")) if args.algorithms else None
    dtype = find_dtype(args.dtype)
    with usage_errors():
        get_op(args.op).check_dtype(dtype)
        chosen = names or tuple(name for name in algorithm_names("all_reduce") if _has_order(name, args.order))
        for name in chosen:
            if name != AUTO:
                find_algorithm(name, collective="all_reduce", order=args.order)
    if args.op == "avg" and args.dtype == "float16":
        raise UsageError("no exact check is known for avg of float16, whose partial means are rounded: choose another")
    sizes = tuple(parse_sizes(args.sizes))
    return BenchPlan(chosen, sizes, args.dtype, args.op, args.order, args.warmup, args.iters, args.load)


def _has_order(name: str, order: str | None) -> bool:
    from microddp.schedule.registry import find_algorithm

    try:
        find_algorithm(name, order=order)
    except ValueError:
        return False
    return True


def _write(args: argparse.Namespace, plan: BenchPlan, rows: list[Row], world_size: int, num_threads: int) -> None:
    out = Output()
    transport = args.transport
    if args.json:
        head = {"ranks": world_size, "transport": transport, "threads_per_rank": num_threads}
        units = {"size": "bytes", "count": "elements", "time_us": "microseconds", "algbw": "GB/s", "busbw": "GB/s"}
        settings = {"warmup": plan.warmup, "iters": plan.iters, "order": plan.order}
        wrong = sum(row.out_of_place.wrong + row.in_place.wrong for row in rows)
        out.json({**head, **settings, "units": units, "rows": [row.as_json() for row in rows], "ok": not wrong})
        return
    order = ", in rank order" if plan.order else ""
    threads = f"{counted(num_threads, 'torch thread')} a rank"
    out.line(f"all_reduce over {counted(world_size, 'rank')}, transport {transport}, {threads}{order}", "bold")
    out.paragraph(
        f"time: median of {counted(plan.iters, 'iteration')} of the slowest rank, after {plan.warmup} for warming up; "
        f"busbw = algbw 2(n-1)/n; GB = 10^9 bytes; #wrong: against an exact check, all ranks together.",
        "dim",
    )
    for algorithm in plan.algorithms:
        out.heading(algorithm)
        _write_table(out, [row for row in rows if row.algorithm == algorithm])


def _write_table(out: Output, rows: list[Row]) -> None:
    columns = [Column("size\n(B)", "right"), Column("count\n(elements)", "right"), Column("type"), Column("redop")]
    if any(row.chosen != row.algorithm for row in rows):
        columns.append(Column("algorithm"))
    fields = [[str(row.size), str(row.count), row.dtype, row.op] for row in rows]
    for each, row in zip(fields, rows):
        each += [row.chosen] if len(columns) == 5 else []
    if out.width >= _WIDE + 11 * (len(columns) - 4):
        for place in ("out-of-place", "in-place"):
            columns += [Column(header, "right") for header in (f"{place}\ntime (us)", *_HEADERS[1:])]
        cells = [[*each, *_cells(row.out_of_place), *_cells(row.in_place)] for each, row in zip(fields, rows)]
    else:
        columns += [Column("place"), *(Column(header, "right") for header in _HEADERS)]
        pairs = ((each, row) for each, row in zip(fields, rows))
        cells = [
            [*each, place, *_cells(measured)]
            for each, row in pairs
            for place, measured in (("out", row.out_of_place), ("in", row.in_place))
        ]
    out.table(columns, cells)


def _cells(measured: Measurement) -> list[str]:
    wrong = str(measured.wrong)
    return [f"{measured.time_us:.1f}", f"{measured.algbw:.3f}", f"{measured.busbw:.3f}", wrong]

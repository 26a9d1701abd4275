"""``microddp bench``: time and bandwidth of all-reduce, in nccl-tests' columns."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from microddp.cli.bench_compare import COMPARED, check_gpus, check_op
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
        "what NumPy computes; any makes the exit status 1. With --compare, torch's own all_reduce is timed in the same "
        "iterations, in place; ratio is its time over ours in place: above 1 ours is faster.",
    )
    parser.add_argument(
        "--ranks",
        type=integer(1, _MAX_RANKS),
        metavar="N",
        help="number of ranks (4, or torchrun's, or the number of GPUs)",
    )
    parser.add_argument(
        "--transport",
        choices=["gloo", "thread", "nccl"],
        help="processes, threads, or processes with a GPU each (gloo; with --compare nccl: nccl)",
    )
    parser.add_argument("--compare", choices=list(COMPARED), help="time torch's own all_reduce over this in turn")
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
    args.transport = args.transport or (COMPARED[args.compare] if args.compare else "gloo")
    world_size = _world_size(args, launched)
    load_algorithms(args.load)
    plan = _plan(args)
    if launched is not None:
        with usage_errors():
            comm = microddp.init(args.transport)
        with comm:
            results = [measure_all(comm, plan)]
    elif args.transport == "thread":
        results = microddp.run_threads(measure_all, world_size, args=(plan,))
    else:
        device = "cuda" if args.transport == "nccl" else "cpu"
        results = microddp.run_processes(measure_all, world_size, args=(plan,), device=device)
    rows, num_threads = results[0]
    if launched is None or launched[0] == 0:
        _write(args, plan, rows, world_size, num_threads)
    wrong = sum(each.wrong for row in rows for each in _measurements(row))
    if wrong and (launched is None or launched[0] == 0):
        sys.stderr.write(f"microddp bench: {counted(wrong, 'element')} wrong\n")
    return 1 if wrong else 0


def _world_size(args: argparse.Namespace, launched: tuple[int, int] | None) -> int:
    if args.compare and COMPARED[args.compare] != args.transport:
        raise UsageError(
            f"--compare {args.compare} goes with --transport {COMPARED[args.compare]}, not {args.transport}: "
            "both must reduce the same tensors, between the same processes"
        )
    if args.transport == "nccl":
        num_gpus = check_gpus(args.ranks if launched is None else None)
        args.ranks = num_gpus if launched is None else args.ranks
    if launched is None:
        return int(args.ranks or 4)
    if args.ranks not in (None, launched[1]):
        raise UsageError(f"--ranks {args.ranks} does not fit the {launched[1]} ranks that were launched (WORLD_SIZE)")
    if args.transport == "thread":
        raise UsageError("--transport thread has no meaning under torchrun, whose ranks are processes")
    return launched[1]


def _plan(args: argparse.Namespace) -> BenchPlan:
    from microddp.cli.bench_measure import AUTO, BenchPlan
    from microddp.cli.expected import FOLDED
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
    if args.op not in FOLDED:
        raise UsageError(f"--op {args.op}: results are checked for {', '.join(FOLDED)} only")
    if args.op == "avg" and args.dtype == "float16":
        raise UsageError("no exact check is known for avg of float16, whose partial means are rounded: choose another")
    if args.compare:
        check_op(args.compare, args.op)
    sizes = tuple(parse_sizes(args.sizes))
    return BenchPlan(chosen, sizes, args.dtype, args.op, args.order, args.warmup, args.iters, args.load, args.compare)


def _has_order(name: str, order: str | None) -> bool:
    from microddp.schedule.registry import find_algorithm

    try:
        find_algorithm(name, order=order)
    except ValueError:
        return False
    return True


def _measurements(row: Row) -> list[Measurement]:
    return [each for each in (row.out_of_place, row.in_place, row.compared) if each is not None]


def _write(args: argparse.Namespace, plan: BenchPlan, rows: list[Row], world_size: int, num_threads: int) -> None:
    out = Output()
    transport = args.transport
    if args.json:
        head = {"ranks": world_size, "transport": transport, "threads_per_rank": num_threads}
        units = {"size": "bytes", "count": "elements", "time_us": "microseconds", "algbw": "GB/s", "busbw": "GB/s"}
        settings: dict[str, Any] = {"warmup": plan.warmup, "iters": plan.iters, "order": plan.order}
        if plan.compare:
            settings["compare"] = plan.compare
            units["ratio"] = f"time of torch's {plan.compare} / time_us, both in place"
        wrong = sum(each.wrong for row in rows for each in _measurements(row))
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
    if plan.compare:
        text = f"{plan.compare}: torch's all_reduce in the same iterations; ratio = its time / ours, both in place."
        out.paragraph(text, "dim")
    for algorithm in plan.algorithms:
        out.heading(algorithm)
        _write_table(out, [row for row in rows if row.algorithm == algorithm], plan.compare)


def _write_table(out: Output, rows: list[Row], compare: str | None) -> None:
    columns = [Column("size\n(B)", "right"), Column("count\n(elements)", "right"), Column("type"), Column("redop")]
    shows_chosen = any(row.chosen != row.algorithm for row in rows)
    columns += [Column("algorithm")] * shows_chosen
    fields = [[str(row.size), str(row.count), row.dtype, row.op, *[row.chosen] * shows_chosen] for row in rows]
    compared = [Column(f"{compare}\ntime (us)", "right"), Column(f"vs {compare}\n(ratio)", "right")] if compare else []
    if out.width >= _WIDE + 11 * (len(columns) + len(compared) - 4):
        for place in ("out-of-place", "in-place"):
            columns += [Column(header, "right") for header in (f"{place}\ntime (us)", *_HEADERS[1:])]
        cells = [
            [*each, *_cells(row.out_of_place), *_cells(row.in_place), *_compared(row)]
            for each, row in zip(fields, rows)
        ]
    else:
        columns += [Column("place"), *(Column(header, "right") for header in _HEADERS)]
        cells = [
            [*each, place, *_cells(measured), *beside]
            for each, row in zip(fields, rows)
            for place, measured, beside in (
                ("out", row.out_of_place, [""] * len(compared)),
                ("in", row.in_place, _compared(row)),
            )
        ]
    out.table([*columns, *compared], cells, may_close_up=bool(compared))


def _cells(measured: Measurement) -> list[str]:
    wrong = str(measured.wrong)
    return [f"{measured.time_us:.1f}", f"{measured.algbw:.3f}", f"{measured.busbw:.3f}", wrong]


def _compared(row: Row) -> list[str]:
    """Torch's time, and how many times ours it is."""
    if row.compared is None:
        return []
    return [f"{row.compared.time_us:.1f}", "" if row.ratio is None else f"{row.ratio:.2f}"]

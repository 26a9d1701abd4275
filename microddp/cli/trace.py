"""``microddp trace``: runs one all-reduce on this machine's CPUs and writes what every rank did, and when."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from microddp.cli.bench import launched_ranks
from microddp.cli.output import Column, Output, counted
from microddp.cli.usage import UsageError, integer, load_algorithms, parse_nbytes, usage_errors
from microddp.errors import MicroddpError

if TYPE_CHECKING:
    from microddp.cli.trace_run import RankTrace, TracePlan

__all__ = ["add_parser"]

_MAX_RANKS = 64
_MAX_SLICES = 4096
_ALIGNMENT_NBYTES = 16


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "trace",
        help="write the timeline of an all-reduce for Perfetto",
        description="Runs an all-reduce on local ranks, twice to warm up and once to be traced, and writes what each "
        "rank did as a trace file for ui.perfetto.dev or chrome://tracing: its transfers, combines and waits, and "
        "arrows from sends to receives. On the CPU; docs/profiling.md has the recipes for GPUs.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write, such as trace.json")
    parser.add_argument("--ranks", type=integer(1, _MAX_RANKS), default=4, metavar="N", help="number of ranks (4)")
    parser.add_argument("--transport", choices=["gloo", "thread"], default="gloo", help="processes or threads (gloo)")
    parser.add_argument("--algorithm", default="ring", help="the algorithm (ring)")
    parser.add_argument("--order", choices=["rank"], help="its variant that combines in rank order")
    parser.add_argument("--size", default="64K", help="bytes of the tensor, such as 4096, 64K or 1M (64K)")
    parser.add_argument("--dtype", default="bfloat16", help="element type (bfloat16)")
    parser.add_argument("--op", default="sum", help="operator (sum)")
    parser.add_argument(
        "--slices", type=integer(1, _MAX_SLICES), metavar="K", help="slices of a chunk (the library chooses by size)"
    )
    parser.add_argument("--load", metavar="MODULE", help="a module or .py file that registers algorithms")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if launched_ranks(os.environ) is not None:
        raise UsageError("it starts its ranks itself: call it without torchrun")
    load_algorithms(args.load)
    plan = _plan(args)
    _check_out(args.out)
    from microddp.cli.trace_run import run_traced
    from microddp.tracing_json import write_trace

    traces = run_traced(plan, args.ranks, args.transport)
    ranges = [each for trace in traces for each in trace.ranges]
    about = {"command": "microddp trace", "ranks": args.ranks, "transport": args.transport, **plan.as_json()}
    try:
        write_trace(args.out, ranges, about)
    except OSError as error:
        raise MicroddpError(f"cannot write {args.out}: {error.strerror}") from error
    _report(args, plan, traces, Output())
    return 0


def _plan(args: argparse.Namespace) -> TracePlan:
    from microddp.cli.tensors import find_dtype
    from microddp.cli.trace_run import TracePlan
    from microddp.schedule import schedule
    from microddp.schedule.registry import find_algorithm
    from microddp_kernels.operators import get_op

    dtype = find_dtype(args.dtype)
    with usage_errors():
        op = get_op(args.op)
        op.check_dtype(dtype)
        find_algorithm(args.algorithm, collective="all_reduce", order=args.order)
        num_chunks = schedule(args.algorithm, args.ranks, order=args.order).num_chunks
    if op.lanes:
        lanes = counted(len(op.lanes), "tensor")
        raise UsageError(f"--op {args.op} reduces {lanes} together: choose an operator of one")
    numel = _nbytes(args.size) // dtype.itemsize
    slice_nbytes = None
    if args.slices is not None:
        wanted = -(-numel * dtype.itemsize // (num_chunks * args.slices))
        slice_nbytes = max(-(-wanted // _ALIGNMENT_NBYTES), 1) * _ALIGNMENT_NBYTES
    return TracePlan(args.algorithm, args.order, numel, args.dtype, args.op, slice_nbytes, args.load)


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except UsageError:
        raise UsageError(f"--size: {text!r} is not a number of bytes such as 4096, 4K, 64M or 1G") from None


def _check_out(out: Path) -> None:
    """Before anything runs."""
    if out.is_dir():
        raise UsageError(f"OUT: {out} is a directory, not a file")
    if not out.parent.is_dir():
        raise UsageError(f"OUT: there is no directory {out.parent}")


def _report(args: argparse.Namespace, plan: TracePlan, traces: list[RankTrace], out: Output) -> None:
    from microddp.cli.trace_summary import summarise

    kind = "process" if args.transport == "gloo" else "thread"
    order = " in rank order" if plan.order else ""
    size = f"{plan.nbytes} bytes of {plan.dtype}, {plan.op}"
    where = f"{counted(args.ranks, kind)} over {args.transport}"
    out.line(f"{plan.algorithm}{order} on {where}: {size}, slices of {traces[0].slice_nbytes} bytes", "bold")
    headers = ["time\n(us)", "in waits\n(us)", "in combines\n(us)", "groups", "combines during\ntransfers"]
    columns = [Column("rank", "right"), *(Column(each, "right") for each in headers)]
    rows = []
    for each in summarise([trace.ranges for trace in traces]):
        overlap = "-" if each.overlap is None else f"{each.overlap:.0%}"
        times = (f"{value / 1000:.0f}" for value in (each.total_ns, each.wait_ns, each.combine_ns))
        rows.append([str(each.rank), *times, str(each.num_groups), overlap])
    out.table(columns, rows)
    out.line()
    out.paragraph(
        "in waits: the rank waited for transfers; combines during transfers: the share of its time in combines in "
        "which a message of its own was on the way, sent or received (-: all combines are part of a receive).",
        "dim",
    )
    num_ranges = sum(len(trace.ranges) for trace in traces)
    out.line(f"Wrote {args.out}, {counted(num_ranges, 'range')}.")
    out.line("Open it in https://ui.perfetto.dev (Open trace file; it stays on this machine) or chrome://tracing.")

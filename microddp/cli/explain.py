"""``microddp explain``: an algorithm's timetable, its proof, every step on real numbers, and its bytes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from microddp.cli.output import Output, Progress, counted
from microddp.cli.usage import UsageError, integer, load_algorithms, usage_errors

if TYPE_CHECKING:
    import torch

    from microddp.cli.formulas import Share
    from microddp.cli.playback import Story
    from microddp.schedule import Proof, Schedule
    from microddp_kernels.reduce_op import ReduceOp

__all__ = ["Explanation", "Traffic", "add_parser", "explain"]

MAX_RANKS = 256
_ALL_RANKS, _ALL_STEPS = 8, 14  # up to here everything is shown
_EDGE = 3


@dataclass(frozen=True)
class Traffic:
    """What one rank sent and received by the transport's counters, beside the formula (None: none is known)."""

    rank: int
    sent: int
    received: int
    scheduled_sent: int
    scheduled_received: int
    share: Share | None

    @property
    def is_right(self) -> bool:
        """Whether the counters agree with the schedule's own count and with the formula."""
        agrees = self.share is None or self.share.agrees(self.sent, self.received)
        return agrees and (self.sent, self.received) == (self.scheduled_sent, self.scheduled_received)


@dataclass(frozen=True)
class Explanation:
    """All that is known about one schedule on one set of tensors.

    Attributes:
        stories: what each rank did, with pictures of ``ranks`` after ``steps``.
        ranks, steps: what is shown; step -1 is the start.
        repeats: how many equal elements one shown number stands for.
        wrong_results: texts about elements that are not what NumPy computes.
        num_checked: how many chunks of results were held against NumPy; 0 for operators that it does not know.
    """

    schedule: Schedule
    op: ReduceOp | None
    order: str | None
    dtype: str
    numel: int
    nbytes: int
    proof: Proof
    stories: list[Story]
    traffic: list[Traffic]
    ranks: list[int]
    steps: list[int]
    repeats: int
    wrong_results: list[str]
    num_checked: int

    @property
    def steps_are_right(self) -> bool:
        """Whether the proof's number of steps is the formula's."""
        from microddp.cli.formulas import num_steps_formula

        known = num_steps_formula(self.schedule.algorithm, self.schedule.world_size)
        return known is None or known.nbytes == self.proof.num_steps

    @property
    def is_right(self) -> bool:
        """Whether every count and every result is as it should be."""
        return self.steps_are_right and not self.wrong_results and all(each.is_right for each in self.traffic)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "explain",
        help="show an algorithm step by step on real numbers",
        description="Shows an algorithm's timetable, what is proved about it, what every rank holds after each step "
        "(played for real, one thread a rank), and the bytes that each rank moved beside the formula. "
        "Exit status 1 if any count or result is not what it should be.",
    )
    parser.add_argument("algorithm", metavar="ALGORITHM", help="ring, tree, naive, full_ring, direct, all_gather, …")
    parser.add_argument("--ranks", type=integer(1, MAX_RANKS), required=True, metavar="N", help="number of ranks")
    parser.add_argument("--tensor", metavar="ROWS", help='what each rank holds, such as "1,2,3;4,5,6;7,8,9"')
    parser.add_argument("--dtype", default="float32", help="the tensors' element type (float32)")
    parser.add_argument("--op", default="sum", help="the operator (sum)")
    parser.add_argument("--order", choices=["rank"], help="the variant that combines in rank order")
    parser.add_argument("--root", type=integer(0), default=0, metavar="RANK", help="root of a broadcast or reduce (0)")
    parser.add_argument("--load", metavar="MODULE", help="a module or .py file that registers algorithms, run first")
    parser.add_argument("--full", action="store_true", help="show all ranks, steps and elements, however many")
    parser.add_argument("--json", action="store_true", help="the same as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from microddp.cli.explain_json import as_json
    from microddp.cli.explain_text import write_text

    load_algorithms(args.load)
    explanation = explain(args)
    out = Output()
    if args.json:
        out.json(as_json(explanation))
    else:
        write_text(explanation, out, full=args.full)
    if not explanation.is_right:
        sys.stderr.write("microddp explain: what was counted or computed is not what it should be, see MISMATCH\n")
    return 0 if explanation.is_right else 1


def explain(args: argparse.Namespace) -> Explanation:
    """Proves, plays and counts what ``args`` asks for.

    Raises:
        UsageError: an argument makes no sense.
        ScheduleError: the schedule does not hold its proof.
    """
    from microddp.schedule import schedule as make_schedule

    with usage_errors():
        schedule = make_schedule(args.algorithm, args.ranks, root=args.root, order=args.order)
    rows, repeats = _rows(args, schedule)
    op = _operator(args.op, schedule, rows[0].dtype)
    with Progress("explain", 1) as progress:
        progress.step("proving the schedule")
        proof = schedule.verify()
    ranks = _chosen(range(args.ranks), _ALL_RANKS, args.full)
    steps = [-1, *_chosen(range(proof.num_steps), _ALL_STEPS, args.full)]
    stories = _play(schedule, rows, op, {(rank, step) for rank in ranks for step in steps}, proof.num_steps)
    numel = stories[0].plan.numel
    nbytes = numel * rows[0].dtype.itemsize
    return Explanation(
        schedule,
        op,
        args.order,
        args.dtype,
        numel,
        nbytes,
        proof,
        stories,
        [_traffic(schedule, story, nbytes, rows[0].dtype.itemsize) for story in stories],
        ranks,
        steps,
        repeats,
        *_check_results(schedule, stories, rows, op),
    )


def _rows(args: argparse.Namespace, schedule: Schedule) -> tuple[list[torch.Tensor], int]:
    from microddp.cli.tensors import default_rows, find_dtype, parse_rows

    dtype = find_dtype(args.dtype)
    if args.tensor is None:
        return default_rows(schedule, dtype)
    rows = parse_rows(args.tensor, args.ranks, dtype)
    if schedule.collective == "reduce_scatter" and rows[0].numel() % args.ranks:
        raise UsageError(f"--tensor: {rows[0].numel()} numbers a rank do not divide by {args.ranks} ranks")
    return rows, 1


def _play(
    schedule: Schedule,
    rows: list[torch.Tensor],
    op: ReduceOp | None,
    shown: set[tuple[int, int]],
    num_steps: int,
) -> list[Story]:
    from microddp.cli.playback import play

    with Progress("explain", num_steps + 1) as progress:

        def wanted(rank: int, step: int) -> bool:
            if rank == 0:  # as good as any to tell how far they are
                progress.step(f"step {step} on {counted(schedule.world_size, 'thread')}")
            return (rank, step) in shown

        return play(schedule, rows, op, wanted)


def _operator(name: str, schedule: Schedule, dtype: torch.dtype) -> ReduceOp | None:
    from microddp_kernels.operators import get_op

    with usage_errors():
        op = get_op(name)
        if schedule.collective in ("all_gather", "broadcast"):
            return None
        op.check_dtype(dtype)
    return op


def _chosen(numbers: range, at_most: int, full: bool) -> list[int]:
    """All of ``numbers``, or, where they are many, the first and the last few."""
    if full or len(numbers) <= at_most:
        return list(numbers)
    return [*numbers[:_EDGE], *numbers[-_EDGE:]]


def _traffic(schedule: Schedule, story: Story, nbytes: int, itemsize: int) -> Traffic:
    from microddp.cli.formulas import share_of

    rank, counters = story.rank, story.counters
    return Traffic(
        rank,
        counters.bytes_sent,
        counters.bytes_received,
        schedule.bytes_sent(rank, nbytes),
        schedule.bytes_received(rank, nbytes),
        share_of(schedule.algorithm, rank, schedule.world_size, nbytes, schedule.root),
    )


def _check_results(
    schedule: Schedule, stories: list[Story], rows: list[torch.Tensor], op: ReduceOp | None
) -> tuple[list[str], int]:
    """What is wrong, in words, and how many chunks were checked."""
    from microddp.cli.expected import expected_result

    wrong, num_checked = [], 0
    for story in stories:
        want = expected_result(schedule.collective, story.rank, rows, op.name if op else "", schedule.root)
        if want is None:
            continue
        for chunk in schedule.result_chunks(story.rank):
            num_checked += 1
            text = want.mismatch(story.data, *schedule.chunk_span(chunk, story.plan.numel, story.plan.itemsize))
            if text:
                wrong.append(f"rank {story.rank}, chunk {chunk}: {text}")
    return wrong, num_checked

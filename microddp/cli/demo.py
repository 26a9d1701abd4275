"""``microddp demo``: a real network, its gradients averaged across processes, every figure held against the truth."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from microddp.cli.output import Column, Output, counted
from microddp.cli.usage import UsageError, integer, usage_errors
from microddp.errors import MicroddpError

if TYPE_CHECKING:
    from microddp.cli.demo_checks import Check, Comparison, Traffic
    from microddp.cli.demo_training import Digits, Method, RankReport, TrainingPlan

__all__ = ["add_parser"]

_EPOCHS = 12
_BATCH = 128
_MAX_RANKS = 64


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="train a small network on several ranks and check every figure",
        description="Trains a small network on scikit-learn's handwritten digits, its gradients averaged across local "
        "processes; then runs all algorithms on the gradients of the last step. Exit status 1 if the parameters, the "
        "bytes, the errors or the bits are not what they should be.",
    )
    parser.add_argument("--ranks", type=integer(1, _MAX_RANKS), default=4, metavar="N", help="number of processes (4)")
    parser.add_argument("--epochs", type=integer(1), default=_EPOCHS, help=f"passes over the data ({_EPOCHS})")
    parser.add_argument("--algorithm", default="ring", help="what averages the gradients in training (ring)")
    parser.add_argument("--order", choices=["rank"], help="its variant that combines in rank order")
    parser.add_argument("--seed", type=integer(0, 2**31), default=0, help="of the data's order and the network (0)")
    parser.add_argument(
        "--corrupt",
        type=integer(0),
        metavar="RANK",
        help="spoil this rank's averaged gradient in one step: a test of the checks, which must fail",
    )
    parser.add_argument("--json", action="store_true", help="the results as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    started = time.monotonic()
    plan = _plan(args)
    digits = _load_digits(plan.seed)
    import microddp
    from microddp.cli.demo_checks import check_training, compare
    from microddp.cli.demo_training import train_alone, train_rank

    out = Output()
    if not args.json:
        _write_title(plan, digits, out)
    reports = microddp.run_processes(train_rank, plan.world_size, args=(plan, digits))
    checks = check_training(reports, train_alone(plan, digits), require_accuracy=plan.epochs >= _EPOCHS)
    comparisons = compare(plan.compared, reports)
    failures = [f"{check.name}: {check.seen}" for check in checks if check.passed is False]
    failures += [f"{_name(each.method)}: {text}" for each in comparisons for text in each.failures]
    if args.json:
        out.json(_as_json(plan, reports, checks, comparisons, failures))
    else:
        _write_results(plan, checks, comparisons, out)
        verdict = "All checks passed" if not failures else f"{counted(len(failures), 'check')} failed"
        out.line()
        out.line(f"{verdict}, in {time.monotonic() - started:.0f} s.", "bold green" if not failures else "bold red")
    for text in failures:
        sys.stderr.write(f"microddp demo: failed: {text}\n")
    return 1 if failures else 0


def _plan(args: argparse.Namespace) -> TrainingPlan:
    from microddp.cli.demo_training import Method, TrainingPlan
    from microddp.schedule import algorithm_names
    from microddp.schedule.registry import find_algorithm

    with usage_errors():
        find_algorithm(args.algorithm, collective="all_reduce", order=args.order)
    if args.corrupt is not None and args.corrupt >= args.ranks:
        raise UsageError(f"--corrupt {args.corrupt} is not one of {counted(args.ranks, 'rank')}")
    compared: list[Method] = []
    for name in algorithm_names("all_reduce"):
        compared.append(Method(name))
        if not find_algorithm(name).same_bits:
            compared.append(Method(name, "rank"))
    return TrainingPlan(
        world_size=args.ranks,
        epochs=args.epochs,
        batch_size=max(1, _BATCH // args.ranks) * args.ranks,
        seed=args.seed,
        method=Method(args.algorithm, args.order),
        corrupt=args.corrupt,
        compared=tuple(compared),
        live=not args.json,
    )


def _load_digits(seed: int) -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MicroddpError("the demo needs scikit-learn: pip install 'microddp[demo]'") from error
    import torch

    from microddp.cli.demo_training import split_digits

    images, digits = load_digits(return_X_y=True)
    return split_digits(torch.from_numpy(images).float() / 16, torch.from_numpy(digits).long(), seed)


def _name(method: Method) -> str:
    return f"{method.algorithm} in rank order" if method.order else method.algorithm


def _write_title(plan: TrainingPlan, digits: Digits, out: Output) -> None:
    out.line(f"Handwritten digits on {counted(plan.world_size, 'process')} over Gloo", "bold")
    batch = f"batches of {plan.batch_size}, {plan.batch_size // plan.world_size} a rank"
    out.paragraph(
        f"{len(digits.train_digits)} images for training, {len(digits.test_digits)} for testing; {batch}; "
        f"gradients averaged by {_name(plan.method)}."
    )
    out.line()
    out.line("epoch      loss  accuracy (test)", "bold")


def _write_results(plan: TrainingPlan, checks: list[Check], comparisons: list[Comparison], out: Output) -> None:
    out.line()
    verdicts = {True: "OK", False: "MISMATCH", None: f"not checked before epoch {_EPOCHS}"}
    out.table([Column("check"), Column("seen"), Column("")], [[c.name, c.seen, verdicts[c.passed]] for c in checks])
    out.heading("The algorithms on the gradients of the last step")
    n, size = plan.world_size, comparisons[0].nbytes
    out.paragraph(f"n = {n}, S = {size} bytes of float32; bytes counted by the transport, beside the formula.", "dim")
    headers = ["algorithm", "steps", "bytes\nsent", "bytes\nrecv.", "formula\n(each)", "time\n(ms)", "largest\nerror"]
    right = {1, 2, 3, 5, 6}
    columns = [Column(each, "right" if number in right else "left") for number, each in enumerate(headers)]
    columns += [Column("same\nbits"), Column("")]
    out.table(columns, [row for each in comparisons for row in _rows(each)])
    for each in comparisons:
        if not each.promises_same_bits and not each.same_bits:
            out.paragraph(
                f"{each.method.algorithm} adds in the order of arrival, which differs from rank to rank: all are right "
                "to within rounding, but their last bits differ. In rank order every rank adds alike.",
                "dim",
            )
    out.paragraph("error: against the mean in float64; OK: within what rounding allows.", "dim")


def _rows(each: Comparison) -> list[list[str]]:
    several = len(each.traffic) > 1
    name = "in rank order" if each.method.order else each.method.algorithm
    bits = "yes" if each.same_bits else "NO" if each.promises_same_bits else "no"
    verdict = "MISMATCH" if each.failures else "OK"
    rows = []
    for number, traffic in enumerate(each.traffic):
        role = traffic.share.role if traffic.share else f"rank {traffic.ranks[0]}"
        label = (f"{name}, {role}" if not number else f"  {role}") if several else name
        formula = str(traffic.share.sent) if traffic.share else "none known"
        bytes_cells = [str(traffic.sent), str(traffic.received), formula]
        rest = [f"{each.time_ms:.2f}", f"{each.error:.1e}", bits, verdict] if not number else [""] * 4
        rows.append([label, "" if number else str(each.steps), *bytes_cells, *rest])
    return rows


def _as_json(
    plan: TrainingPlan,
    reports: list[RankReport],
    checks: list[Check],
    comparisons: list[Comparison],
    failures: list[str],
) -> dict[str, Any]:
    return {
        "ranks": plan.world_size,
        "algorithm": plan.method.algorithm,
        "order": plan.method.order,
        "epochs": [{"loss": loss, "accuracy": accuracy} for loss, accuracy in reports[0].history],
        "checks": [check.as_json() for check in checks],
        "nbytes": comparisons[0].nbytes,
        "algorithms": [_comparison_json(each) for each in comparisons],
        "failures": failures,
        "ok": not failures,
    }


def _comparison_json(each: Comparison) -> dict[str, Any]:
    return {
        "algorithm": each.method.algorithm,
        "order": each.method.order,
        "steps": each.steps,
        "bytes": [_traffic_json(traffic) for traffic in each.traffic],
        "time_ms": each.time_ms,
        "error": each.error,
        "error_over_bound": each.error_ratio,
        "same_bits": each.same_bits,
        "promises_same_bits": each.promises_same_bits,
        "ok": not each.failures,
    }


def _traffic_json(traffic: Traffic) -> dict[str, Any]:
    share = traffic.share
    known = None if share is None else {"text": share.sent.text, "nbytes": float(share.sent.nbytes)}
    role = None if share is None else share.role
    return {
        "ranks": list(traffic.ranks),
        "role": role,
        "sent": traffic.sent,
        "received": traffic.received,
        "formula": known,
        "ok": traffic.is_right,
    }

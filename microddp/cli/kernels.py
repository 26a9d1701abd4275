"""``microddp kernels``: what the kernels compile to, without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from typing import TYPE_CHECKING

from microddp.cli.output import Output, Progress, counted
from microddp.cli.usage import UsageError, usage_errors
from microddp.errors import MicroddpError

if TYPE_CHECKING:
    from microddp_kernels.inspection import Case, KernelFacts, KernelFailure

__all__ = ["add_parser"]

_ALL_ARCHS = (80, 90, 100)
_OF_AN_OPERATOR = ("combine", "fold", "finish")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "kernels",
        help="compile the kernels without a GPU and report registers, spills, widths and bytes moved",
        description="Compiles kernels for every operator and element type with the real Triton compiler, needing no "
        "GPU, and prints what their PTX and machine code hold. By default: the combination of two operands, all "
        "operators, all element types, sm_90. docs/kernels.md says how each figure is read. "
        "Exit status 1 if a kernel does not compile or breaks a rule.",
    )
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help="an operator's name, or MODULE:NAME of one in a module"
    )
    parser.add_argument("--arch", metavar="LIST", help="such as sm_80,sm_90,sm_100 (sm_90; with --all these three)")
    parser.add_argument("--op", action="append", metavar="LIST", help="operators, as OPERATOR (all)")
    parser.add_argument("--dtype", action="append", metavar="LIST", help="element types of the first lane (all)")
    parser.add_argument("--kernel", action="append", metavar="LIST", help="such as combine,fold,copy (combine)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--all", action="store_true", help="every kernel, for all three architectures")
    amount.add_argument("--quick", action="store_true", help="of each operator and kernel the first element type only")
    parser.add_argument("--json", metavar="FILE", help="write all facts to FILE as JSON (- for the standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from microddp.cli.kernels_report import as_json, write_report

    if importlib.util.find_spec("triton") is None:
        raise MicroddpError("Triton is not installed, and it is what compiles the kernels")
    cases = _cases(args)
    started = time.monotonic()
    found = _inspected(cases)
    if args.json == "-":
        Output().json(as_json(found))
    else:
        write_report(found, Output(), time.monotonic() - started)
        if args.json:
            _write_json(args.json, found)
    num_bad = sum(bool(each.violations()) for each in found)
    if num_bad:
        sys.stderr.write(f"microddp kernels: {counted(num_bad, 'kernel')} of {len(found)} not as they should be\n")
    return 1 if num_bad else 0


def _cases(args: argparse.Namespace) -> list[Case]:
    from microddp_kernels.inspection import KERNELS, cases_for

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's module is looked for
    operators = [*args.operators, *_listed(args.op)]
    kernels = _listed(args.kernel) or (KERNELS if args.all else _OF_AN_OPERATOR if args.operators else ("combine",))
    archs = [_arch(each) for each in args.arch.split(",")] if args.arch else _ALL_ARCHS if args.all else (90,)
    with usage_errors():
        cases = cases_for(archs, operators or None, _listed(args.dtype) or None, list(kernels), args.quick)
    if not cases:
        raise UsageError("there is nothing to compile: no such kernel of these operators on these element types")
    return cases


def _listed(values: list[str] | None) -> list[str]:
    return [each.strip() for value in values or () for each in value.split(",") if each.strip()]


def _arch(text: str) -> int:
    found = re.fullmatch(r"(?:sm_?)?(\d{2,3})", text.strip())
    if found is None:
        raise UsageError(f"--arch: {text.strip()!r} is not an architecture such as sm_90")
    return int(found[1])


def _inspected(cases: list[Case]) -> list[KernelFacts | KernelFailure]:
    """What is known of each case, in their order."""
    from microddp_kernels.inspection import InspectionError, inspect_cases

    found: dict[int, KernelFacts | KernelFailure] = {}
    try:
        with Progress("compiling", len(cases)) as progress:
            progress.step(cases[0].text)
            for index, each in inspect_cases(cases):
                found[index] = each
                if len(found) < len(cases):
                    progress.step(cases[len(found)].text)
    except InspectionError as error:
        raise MicroddpError(str(error)) from error
    return [each for _, each in sorted(found.items())]


def _write_json(path: str, found: list[KernelFacts | KernelFailure]) -> None:
    from microddp.cli.kernels_report import as_json

    try:
        with open(path, "w", encoding="utf-8") as stream:
            Output(stream).json(as_json(found))
    except OSError as error:
        raise MicroddpError(f"--json {path}: {error.strerror}") from error

"""The ``microddp`` command: reads the arguments, runs a command, and says in one line what went wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from microddp.cli import bench, demo, explain, kernels, trace
from microddp.cli.output import ascii_text
from microddp.cli.usage import UsageError
from microddp.errors import MicroddpError

__all__ = ["main"]

OK, FAILED, BAD_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``microddp`` with ``argv`` (None: the process's arguments) and returns its exit status.

    0: all well; 1: a check or a run failed; 2: bad usage.
    """
    name = "microddp"
    try:
        args = _parser().parse_args(argv)
        name = f"microddp {args.command}"
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except SystemExit as done:  # argparse has said what there is to say
        return done.code if isinstance(done.code, int) else BAD_USAGE
    except UsageError as error:
        _complain(name, error, others_too=False)
        return BAD_USAGE
    except BrokenPipeError:  # whoever read the output has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except MicroddpError as error:
        _complain(name, error, others_too=True)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="microddp",
        description="All-reduce algorithms as data: proved, counted and run on real tensors.",
        epilog="microddp COMMAND --help says more about each.",
    )
    parser.add_argument("--version", action="version", version=f"microddp {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for each in (demo, explain, bench, trace, kernels):
        each.add_parser(commands)
    return parser


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("microddp")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"


def _complain(name: str, error: BaseException, *, others_too: bool) -> None:
    """One line on the error stream; under torchrun, what all ranks would say alike is said by rank 0 only."""
    if others_too or os.environ.get("RANK", "0") == "0":
        first = str(error).strip().partition("\n")[0]
        sys.stderr.write(ascii_text(f"{name}: error: {first}\n", sys.stderr.encoding or "utf-8"))

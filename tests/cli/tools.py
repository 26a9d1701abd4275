"""Runs the command in this process, as a pipe would see it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from microddp.cli import main

ROOT = Path(__file__).resolve().parents[2]
WORKED_EXAMPLE = "1,2,3;4,5,6;7,8,9"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")

# An all-reduce of two ranks, as a user would add it.
SWAP = """
from microddp.schedule import OWN, Fold, Recv, Send, Step, algorithm, only

@algorithm("swap")
def swap(rank, world_size):
    "Two ranks exchange what they hold."
    for other in [1 - rank] if world_size == 2 else []:
        operands = (OWN, other) if rank == 0 else (other, OWN)
        yield Step((Send(other, 0), Recv(other, 0, only(other), key=other)), folds=(Fold(0, operands),))
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Pipe(io.TextIOWrapper):
    """A stream that is no terminal, or says that it is one, with an encoding of its own."""

    def __init__(self, encoding: str = "utf-8", is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def text(self) -> str:
        self.flush()
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode(self.encoding)


@contextmanager
def streams(out: Pipe, err: Pipe) -> Iterator[None]:
    saved = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = saved


def run(*argv: str, width: int = 120, encoding: str = "utf-8", is_terminal: bool = False) -> Outcome:
    """``main(argv)`` with its streams captured."""
    out, err = Pipe(encoding, is_terminal), Pipe(encoding)
    with pytest.MonkeyPatch.context() as patch, streams(out, err):
        patch.setenv("COLUMNS", str(width))
        status = main(argv)
    return Outcome(status, out.text, err.text)


def run_process(*argv: str, timeout_s: float = 100, module: tuple[str, ...] = ("microddp",)) -> Outcome:
    """``python -m microddp ...`` as a process, its output piped."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    command = [sys.executable, "-m", *module, *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:  # at the time limit it is ended with every process that it started
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Outcome(process.returncode, out, err)

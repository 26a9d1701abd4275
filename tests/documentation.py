"""Finds the commands and programs shown in Markdown, runs them, and compares what they print with what is shown.

A fenced ``console`` or ``bash`` block holds lines that start with ``$ ``, each a command of its own (a trailing
backslash continues it), and below each what it prints, in whole or in part: each line shown must be printed, in that
order, others may come between; a line ``...`` says so. A ``python`` block is a program of its own.

Comments directly above a block: ``<!-- not run: REASON -->``, and ``<!-- output varies -->`` if numbers, spaces and
the width of rules may differ.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELL_LANGUAGES = frozenset({"bash", "console"})
FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it starts, its language, its lines, the comments directly above it."""

    document: str
    line: int
    language: str
    lines: tuple[str, ...]
    comments: tuple[str, ...]

    @property
    def reason_not_run(self) -> str | None:
        found = (comment.removeprefix("not run:") for comment in self.comments if comment.startswith("not run:"))
        return next((reason.strip() for reason in found), None)

    @property
    def output_varies(self) -> bool:
        return "output varies" in self.comments


@dataclass(frozen=True)
class Command:
    """One command line, and the lines shown below it."""

    text: str
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """How a command ended (None: it was stopped at its time limit), and what it wrote on both streams."""

    status: int | None
    output: str


def find_blocks(document: str, text: str) -> Iterator[Block]:
    """All fenced blocks at the margin of a Markdown text."""
    comments: list[str] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if fence := FENCE.match(line):
            body: list[str] = []
            for _, inner in lines:
                if inner.rstrip() == fence["fence"]:
                    break
                body.append(inner)
            yield Block(document, number, fence["language"], tuple(body), tuple(comments))
            comments = []
        elif comment := COMMENT.match(line.strip()):
            comments.append(comment[1])
        elif line.strip():
            comments = []


def find_commands(block: Block) -> list[Command]:
    """The commands of a shell block, in order."""
    commands: list[Command] = []
    lines = iter(block.lines)
    for line in lines:
        if line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text = text[:-1] + next(lines, "").strip()
            commands.append(Command(text, ()))
        elif commands and line.strip():
            commands[-1] = Command(commands[-1].text, (*commands[-1].shown, line))
    return commands


def environment() -> dict[str, str]:
    """The environment of documented commands: this interpreter's scripts first, plain text, a fixed width."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}


def run(argv: list[str], cwd: Path, timeout_s: float, env: Mapping[str, str] | None = None) -> Result:
    """Runs a command without input; at the time limit it is ended with every process that it started."""
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Result(None, output)
    return Result(process.returncode, output)


def missing_line(shown: tuple[str, ...], output: str, varies: bool) -> str | None:
    """The first line of ``shown`` that ``output`` does not hold after the ones before it, or None."""
    printed = iter([_comparable(line, varies) for line in output.splitlines()])
    for line in shown:
        if line.strip() not in ("...", "…") and _comparable(line, varies) not in printed:
            return line
    return None


def _comparable(line: str, varies: bool) -> str:
    if not varies:
        return line.rstrip()
    line = re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "#", line)
    return " ".join(re.sub(r"([─━═=-])\1+", r"\1", line).split())

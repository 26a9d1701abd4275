"""What a process of the device check reports: lines of JSON in a file, so that what it found outlives a crash."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Context", "NoDeviceError", "Outcome", "Record", "checks_of", "outcome_of", "read_records"]

Record = dict[str, Any]
"""``kind`` is one of: ready, step, check, figure, note, summary, error, no_device, end."""


class NoDeviceError(RuntimeError):
    """There is no GPU that this part could use."""


@dataclass
class Context:
    """What a part, or one rank of it, is given, and how it reports.

    Attributes:
        path: the file of its records.
        folder: shared by all parts of one run.
        stand_in: there is no device: show that the code runs, and report no figures.
        options: what whoever started this process wants of it.
        deadline: in ``time.monotonic()`` seconds; what takes longer is killed a little later.
        prepared: what the part's ``prepare`` returned.
    """

    path: Path
    folder: Path
    stand_in: bool
    options: dict[str, Any] = field(default_factory=dict)
    deadline: float = float("inf")
    prepared: Any = None

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def write(self, kind: str, **values: Any) -> None:
        """Appends a record."""
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}, default=str) + "\n")

    def step(self, name: str) -> None:
        """Says what is about to be done: where it was, if it then dies."""
        self.write("step", name=name)

    def check(self, name: str, ok: bool, detail: str = "") -> bool:
        """Reports whether something is as it must be; returns ``ok``."""
        self.write("check", name=name, ok=bool(ok), detail=detail)
        return ok

    def figure(self, name: str, value: float, unit: str, **more: Any) -> None:
        """Reports a measurement."""
        self.write("figure", name=name, value=value, unit=unit, **more)

    def note(self, name: str, value: Any) -> None:
        """Reports a fact that is neither."""
        self.write("note", name=name, value=value)

    def summary(self, text: str) -> None:
        """A line for the table."""
        self.write("summary", text=text)

    def error(self, error: BaseException) -> None:
        """Reports what ended it."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.write("error", text=f"{type(error).__name__}: {error}", traceback=trace)


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and what it reported.

    Attributes:
        status: "ok", "FAILED" (a check), "raised", "crashed", "timed out", "hung" (after its work) or "no device".
        detail: why.
        records: all that it reported.
        errors: the end of what it wrote to its error stream.
    """

    status: str
    detail: str
    records: Sequence[Record] = ()
    errors: str = ""

    def of(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [each for each in self.records if each["kind"] == kind]


def read_records(path: Path) -> list[Record]:
    """What was reported so far. A line that was cut off by the end of its process is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def outcome_of(records: Sequence[Record], exit_code: int | None, seconds: float, errors: str = "") -> Outcome:
    """What the records and the exit say together. ``exit_code`` None: it was still running after ``seconds``."""
    status, detail = _judged(records, exit_code, seconds)
    return Outcome(status, detail, tuple(records), errors)


def _judged(records: Sequence[Record], exit_code: int | None, seconds: float) -> tuple[str, str]:
    by_kind = {each["kind"]: each for each in records}
    where = f" (last: {by_kind['step']['name']})" if "step" in by_kind else ""
    if "no_device" in by_kind:
        return "no device", str(by_kind["no_device"]["text"])
    if "error" in by_kind:
        return "raised", str(by_kind["error"]["text"]) + where
    if exit_code is None and "end" in by_kind:
        return "hung", "its work was done, but the process did not exit"
    if exit_code is None:
        what = "its work" if "ready" in by_kind else "its imports"
        return "timed out", f"{what} took longer than {seconds:.0f} s{where}"
    if exit_code or "end" not in by_kind:
        how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
        return "crashed", how + where
    return _checked(records)


def _checked(records: Iterable[Record]) -> tuple[str, str]:
    checks = checks_of(records)
    wrong = [each for each in checks if not each["ok"]]
    if not wrong:
        return "ok", ""
    first = f"{wrong[0]['name']}: {wrong[0]['detail']}".rstrip(": ")
    return "FAILED", f"{len(wrong)} of {len(checks)}: {first}"


def checks_of(records: Iterable[Record]) -> list[Record]:
    """The checks among them."""
    return [each for each in records if each["kind"] == "check"]

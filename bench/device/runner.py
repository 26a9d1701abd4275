"""Runs parts one after another, each in a process of its own and for its share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.device.parts import Part
from bench.device.processes import Child, wait_until
from bench.device.records import Outcome

__all__ = ["NO_FIGURE", "Result", "run_parts"]

NO_FIGURE: Final = "no figure without a device"
_RESERVE_S: Final = 2.0  # for killing the last part, and for the table
_MARGIN: Final = 0.88
"""Of its time a part is told so much: the rest is for ending."""
_EXIT_S: Final = 5.0
_READY_SHARE: Final = 0.4


@dataclass(frozen=True)
class Result:
    """What came of a part, and the seconds that it took."""

    part: Part
    outcome: Outcome
    seconds: float


def run_parts(
    parts: Sequence[Part],
    seconds: float,
    folder: Path,
    *,
    stand_in: bool,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Runs them within ``seconds``. What a part does not use is shared by those after it.

    Whatever a part does, it ends in its result and the next one runs.
    """
    deadline = time.monotonic() + seconds - _RESERVE_S
    results: list[Result] = []
    coming: Child | None = None
    try:
        for index, part in enumerate(parts):
            if not _runs(part, stand_in):
                results.append(Result(part, Outcome("no device", NO_FIGURE), 0.0))
            else:
                started = time.monotonic()
                child, coming = coming or _start(part, folder, stand_in), None
                remaining = [each for each in parts[index:] if _runs(each, stand_in)]
                coming = _play(child, remaining, deadline, folder, stand_in)
                results.append(Result(part, child.finish(), time.monotonic() - started))
            report(results[-1])
    finally:
        if coming is not None:
            coming.finish()
    return results


def _runs(part: Part, stand_in: bool) -> bool:
    return part.stands_in or not stand_in


def _start(part: Part, folder: Path, stand_in: bool) -> Child:
    return Child(
        part.name,
        part.function,
        folder,
        prepare=part.prepare,
        stand_in=stand_in,
        needs_device=part.needs_device,
        own_session=True,
    )


def _play(child: Child, remaining: Sequence[Part], deadline: float, folder: Path, stand_in: bool) -> Child | None:
    """Lets the first of the remaining parts work and waits for its end; returns the next, if it was started already."""
    part = remaining[0]
    now = time.monotonic()
    wait_until(child.is_ready, now + (deadline - now) * _READY_SHARE)
    now = time.monotonic()
    share = max(deadline - now, 0.0) * part.weight / sum(each.weight for each in remaining)
    if not child.is_ready():
        return None
    child.go(share * _MARGIN)
    coming = None
    if len(remaining) > 1 and not part.is_timing:  # a start beside it would show in the figures
        coming = _start(remaining[1], folder, stand_in)
    if wait_until(child.has_finished, now + share):
        wait_until(child.has_ended, min(time.monotonic() + _EXIT_S, deadline))
    return coming

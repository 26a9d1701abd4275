"""Recorded ranges as a trace file that Perfetto and chrome://tracing open: the Trace Event Format's JSON.

One process row for each rank, in it one thread row for each track. Where ranges of a track overlap without nesting, as
transfers in flight do, the track has as many rows as it takes. An arrow leads from a send to its receive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from microddp.tracing import COMBINES, FUSED, HOST, TRANSFERS
from microddp.tracing_sinks import Message, Recorded

__all__ = ["trace_events", "write_trace"]

_NESTING: Final = (HOST,)
_ORDER: Final = (HOST, TRANSFERS, COMBINES, FUSED, "groups", "kernels")
_FLOW: Final = "message"

Row = tuple[int, str, int]  # rank, track, number among the rows of the track


def write_trace(path: Path, ranges: Sequence[Recorded], about: dict[str, Any] | None = None) -> None:
    """Writes a trace file; ``about`` is kept in it for whoever wants to know what was traced.

    Raises:
        OSError: it cannot be written.
    """
    document = {"traceEvents": trace_events(ranges), "displayTimeUnit": "ns", "otherData": about or {}}
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n", "utf-8")


def trace_events(ranges: Sequence[Recorded]) -> list[dict[str, Any]]:
    """The events of a trace, in no particular order. Times are microseconds from the first range's start."""
    zero = min((each.start_ns for each in ranges), default=0)
    placed = _place(ranges)
    rows = sorted({row for row, _ in placed}, key=lambda row: (row[0], _rank_of_track(row[1]), row[1], row[2]))
    tids = {row: number for number, row in enumerate(rows, start=1)}
    events = _labels(rows, tids)
    receipts = {message for each in ranges for message in each.receives}
    numbers = {each: n for n, each in enumerate(sorted(m for r in ranges for m in r.sends if m in receipts), start=1)}
    for row, each in placed:
        where = {"pid": row[0], "tid": tids[row], "cat": row[1]}
        times = {"ts": _us(each.start_ns - zero), "dur": _us(each.end_ns - each.start_ns)}
        events.append({"ph": "X", "name": each.name, **times, **where})
        events += _arrows(each, where, zero, numbers)
    return events


def _place(ranges: Iterable[Recorded]) -> list[tuple[Row, Recorded]]:
    """Each range with its row: the first of its track in which it nests, or is alone, as the track demands."""
    placed: list[tuple[Row, Recorded]] = []
    open_until: dict[tuple[int, str], list[list[int]]] = {}  # for each row the ends of what is open, outermost first
    for each in sorted(ranges, key=lambda found: (found.start_ns, -found.end_ns)):
        rows = open_until.setdefault((each.rank, each.track), [])
        for ends in rows:
            while ends and ends[-1] <= each.start_ns:
                ends.pop()
        fitting = (n for n, ends in enumerate(rows) if not ends or (each.track in _NESTING and each.end_ns <= ends[-1]))
        number = next(fitting, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(each.end_ns)
        placed.append(((each.rank, each.track, number), each))
    return placed


def _labels(rows: Sequence[Row], tids: dict[Row, int]) -> list[dict[str, Any]]:
    events = []
    for rank in sorted({rank for rank, *_ in rows}):
        events.append(_label("process_name", rank, None, name=f"rank {rank}"))
        events.append(_label("process_sort_index", rank, None, sort_index=rank))
    for row in rows:
        rank, track, number = row
        name = f"{track} ({number + 1})" if number else track
        events.append(_label("thread_name", rank, tids[row], name=name))
        events.append(_label("thread_sort_index", rank, tids[row], sort_index=tids[row]))
    return events


def _label(what: str, pid: int, tid: int | None, **args: Any) -> dict[str, Any]:
    where = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": what, **where, "args": args}


def _arrows(each: Recorded, where: dict[str, Any], zero: int, numbers: dict[Message, int]) -> Iterable[dict[str, Any]]:
    """The ends of arrows lie within the range, as that is how a viewer finds the range that they belong to."""
    where = {**where, "cat": _FLOW, "name": _FLOW}
    for message in each.sends:
        if message in numbers:
            yield {"ph": "s", "id": numbers[message], "ts": _us(each.start_ns - zero), **where}
    for message in each.receives:
        if message in numbers:
            last = max(each.start_ns, each.end_ns - 1)
            yield {"ph": "f", "bp": "e", "id": numbers[message], "ts": _us(last - zero), **where}


def _rank_of_track(track: str) -> int:
    return _ORDER.index(track) if track in _ORDER else len(_ORDER)


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000

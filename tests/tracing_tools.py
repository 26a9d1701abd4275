"""What the tests of traces work with: a sum, a sink that insists on nesting, a reader of the Trace Event Format."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

from microddp.plan import Plan
from microddp.tracing_sinks import Sink
from microddp.transport.base import Transport
from tests.engine_tools import make_engine, make_plan, run_sum

Event = dict[str, Any]
Row = tuple[int, int]  # pid, tid
NUMEL = 4 * 48  # four chunks of 192 bytes: three slices of 64


def reduce_all(transport: Transport, num_calls: int = 1, **config: Any) -> Plan:
    """Sums on one rank by an engine; all ranks hold 1 + rank."""
    plan = make_plan("ring", transport.rank, transport.world_size, NUMEL, fuse=transport.fuses_combine, **config)
    engine = make_engine(transport)
    for sequence in range(num_calls):
        data = torch.full((NUMEL,), 1.0 + transport.rank)
        run_sum(engine, plan, data, sequence)
        assert data.eq(sum(range(1, transport.world_size + 1))).all()
    return plan


class StrictSink(Sink):
    """Notes names by thread, and whatever breaks the law: last begun, first ended, on one thread."""

    def __init__(self) -> None:
        self.names: dict[int, list[tuple[int, str]]] = defaultdict(list)  # (depth, name)
        self.violations: list[str] = []
        self._open: dict[int, list[str]] = defaultdict(list)

    def push(self, name: str) -> tuple[int, str]:
        thread = threading.get_ident()
        self.names[thread].append((len(self._open[thread]), name))
        self._open[thread].append(name)
        return thread, name

    def pop(self, token: tuple[int, str]) -> None:
        thread = threading.get_ident()
        stack = self._open[thread]
        if token[0] != thread or not stack or stack[-1] != token[1]:
            self.violations.append(f"{token[1]!r} ended on thread {thread} where {stack} are open")
        if stack:
            stack.pop()

    def check(self) -> None:
        """All ranges were nested and have ended."""
        assert not self.violations, self.violations
        assert not any(self._open.values()), dict(self._open)


def read_trace(events: list[Event]) -> dict[str, dict[str, list[Event]]]:
    """The complete events by process and thread name, in order; fails unless the events are a well-formed trace."""
    processes, threads, rows = _names(events)
    for each in events:
        assert each["ph"] in ("X", "M", "s", "f"), each
        if each["ph"] != "M":
            assert isinstance(each["name"], str) and isinstance(each["cat"], str), each
            assert isinstance(each["ts"], (int, float)) and each["ts"] >= 0, each
            assert (each["pid"], each["tid"]) in threads, f"no thread_name for {each}"
        if each["ph"] == "X":
            assert isinstance(each["dur"], (int, float)) and each["dur"] >= 0, each
            rows[each["pid"], each["tid"]].append(each)
    found: dict[str, dict[str, list[Event]]] = {name: {} for name in processes.values()}
    for (pid, tid), row in rows.items():
        row.sort(key=lambda each: (each["ts"], -each["dur"]))
        _check_nesting(row)
        found[processes[pid]][threads[pid, tid]] = row
    _check_arrows(events, rows)
    return found


def _names(
    events: list[Event],
) -> tuple[dict[int, str], dict[tuple[int, int], str], dict[tuple[int, int], list[Event]]]:
    labels = [each for each in events if each["ph"] == "M"]
    processes = {each["pid"]: each["args"]["name"] for each in labels if each["name"] == "process_name"}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in labels if each["name"] == "thread_name"}
    for each in labels:
        if each["name"].endswith("_sort_index"):
            assert isinstance(each["args"]["sort_index"], int)
    assert len(set(processes.values())) == len(processes)
    assert len({(pid, name) for (pid, _), name in threads.items()}) == len(threads)
    return processes, threads, {where: [] for where in threads}


def _check_nesting(row: list[Event]) -> None:
    ends: list[float] = []
    for each in row:
        while ends and ends[-1] <= each["ts"] + 5e-4:  # half a nanosecond: ts + dur is rounded
            ends.pop()
        end = each["ts"] + each["dur"]
        assert not ends or end <= ends[-1] + 5e-4, f"{each} overlaps what it is not within"
        ends.append(end)


def _check_arrows(events: list[Event], rows: dict[Row, list[Event]]) -> None:
    ends: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
    for each in events:
        if each["ph"] in ends:
            assert each["id"] not in ends[each["ph"]], f"two ends with one id: {each}"
            ends[each["ph"]][each["id"]] = each
            around = rows[each["pid"], each["tid"]]
            assert any(one["ts"] <= each["ts"] <= one["ts"] + one["dur"] for one in around), f"{each} is in no range"
    assert ends["s"].keys() == ends["f"].keys()
    for number, start in ends["s"].items():
        stop = ends["f"][number]
        assert stop["bp"] == "e" and start["pid"] != stop["pid"] and start["ts"] <= stop["ts"], (start, stop)

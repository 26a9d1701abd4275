"""Trace files: every rank, group and message is there, and a viewer can open them; figures of known traces."""

from __future__ import annotations

from typing import Any

import pytest

from microddp import tracing
from microddp.cli.trace_summary import summarise
from microddp.plan import Plan
from microddp.plan.instructions import Send
from microddp.plan.issue import host_issues
from microddp.tracing_json import trace_events
from microddp.tracing_sinks import Recorded
from microddp.transport.thread import run_thread_ranks
from tests.nccl.interleavings_tools import Case, Scenario
from tests.tracing_tools import read_trace, reduce_all

pytestmark = pytest.mark.timeout(30)


def traced(world_size: int, **config: Any) -> tuple[list[Plan], list[Recorded]]:
    with tracing.record() as recorder:
        plans = run_thread_ranks(lambda each: reduce_all(each, num_calls=2, **config), world_size)
    return plans, recorder.ranges


@pytest.mark.parametrize("is_hoisted", [False, True])
def test_a_trace_has_all_ranks_groups_and_arrows(is_hoisted: bool) -> None:
    plans, ranges = traced(4, is_hoisted=is_hoisted)
    events = trace_events(ranges)
    found = read_trace(events)
    assert list(found) == [f"rank {rank}" for rank in range(4)]
    for rank, plan in enumerate(plans):
        rows = found[f"rank {rank}"]
        assert {name.split(" (")[0] for name in rows} == {"host", "transfers", "fused combines"}
        flights = [each for name, row in rows.items() if name.startswith("transfers") for each in row]
        portions = [
            {(plan.instructions[index].step, plan.instructions[index].slice) for index in issue.indices}
            for issue in host_issues(plan)
            if issue.is_post
        ]
        assert len(flights) == 2 * sum(map(len, portions))
        combines = [each for name, row in rows.items() if name.startswith("fused") for each in row]
        assert [each["name"] for each in combines] == ["combine sum"] * (2 * 3 * 3)  # steps and slices
        wholes = [each for each in rows["host"] if each["name"].startswith("microddp/")]
        assert len(wholes) == 2
        assert all(_is_within(each, wholes) for row in rows.values() for each in row)
    num_messages = 2 * sum(isinstance(each, Send) for plan in plans for each in plan.instructions)
    assert sum(each["ph"] == "s" for each in events) == num_messages == 2 * 4 * 6 * 3


def test_the_stream_engine_tells_of_groups_and_kernels() -> None:
    with tracing.record() as recorder:
        Scenario(Case("ring", None, 3, ("wire",)))  # enqueues it on all ranks; float32 that travels as bfloat16
    found = read_trace(trace_events(recorder.ranges))
    assert list(found) == ["rank 0", "rank 1", "rank 2"]
    for rank, rows in enumerate(found.values()):
        assert list(rows) == ["host", "groups", "kernels"]
        ends = f"send→{(rank + 1) % 3} recv←{(rank - 1) % 3}"
        steps = [f"{phase} step {step}/2" for phase in ("scatter-reduce", "all-gather") for step in (1, 2)]
        assert [each["name"] for each in rows["groups"]] == [
            f"{step} slice {piece}/3 {ends}" for step in steps for piece in (1, 2, 3)
        ]
        kernels = [each["name"] for each in rows["kernels"]]
        assert kernels.count("combine sum") == 2 * 3
        assert set(kernels) == {"combine sum", "convert float32→bfloat16", "convert bfloat16→float32"}
        (whole,) = rows["host"]
        assert whole["name"].startswith("microddp/all_reduce ring n=3")
        assert all(_is_within(each, [whole]) for row in rows.values() for each in row)


def _is_within(event: dict[str, Any], wholes: list[dict[str, Any]]) -> bool:
    # A fused combine ends before the rank learns of it; rounding to nanoseconds, as everywhere.
    start, end = event["ts"] + 5e-4, event["ts"] + event["dur"] - 5e-4
    return any(each["ts"] <= start and end <= each["ts"] + each["dur"] for each in wholes)


def recorded(rank: int, track: str, start: int, end: int, **ends: Any) -> Recorded:
    return Recorded(rank, track, "wait x" if track == "host" and start else "x", start, end, **ends)


def test_what_overlaps_gets_rows_of_its_own() -> None:
    spans = [("transfers", 0, 40), ("transfers", 10, 30), ("transfers", 30, 50), ("transfers", 40, 45)]
    ranges = [recorded(1, track, start, end) for track, start, end in [*spans, ("host", 0, 60), ("host", 5, 60)]]
    found = read_trace(trace_events(ranges))
    rows = {name: [(each["ts"], each["dur"]) for each in row] for name, row in found["rank 1"].items()}
    assert rows == {
        "host": [(0, 0.06), (0.005, 0.055)],
        "transfers": [(0, 0.04), (0.04, 0.005)],
        "transfers (2)": [(0.01, 0.02), (0.03, 0.02)],
    }


def test_an_empty_trace() -> None:
    assert trace_events([]) == []


def test_the_summary_of_a_known_trace() -> None:
    message = (0, 0, 1, 0)
    first = [
        recorded(0, "host", 0, 100),
        recorded(0, "host", 20, 30),
        recorded(0, "transfers", 10, 90, sends=(message,)),
        recorded(0, "combines", 40, 60),
    ]
    second = [
        recorded(1, "host", 0, 80),
        recorded(1, "transfers", 50, 70, receives=(message,)),  # the message travels from 50 to 70
        recorded(1, "combines", 0, 40),
        recorded(1, "combines", 65, 75),
        recorded(1, "fused combines", 30, 35),
        recorded(1, "fused combines", 33, 36),
    ]
    alone = [recorded(2, "host", 0, 7)]
    one, two, three = summarise([first, second, alone])
    assert (one.total_ns, one.wait_ns, one.combine_ns, one.num_groups, one.overlap) == (100, 10, 20, 1, 0.5)
    assert (two.total_ns, two.wait_ns, two.combine_ns, two.num_groups, two.overlap) == (80, 0, 56, 1, 0.1)
    assert (three.total_ns, three.num_groups, three.overlap) == (7, 0, None)

"""The names of ranges: exact, for known plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microddp.plan import Plan
from microddp.plan.instructions import Buffer, Combine, Copy, Send, Span
from microddp.plan.issue import host_issues
from microddp.plan.streams import Group, stream_program
from microddp.staging import LaneTypes
from microddp.tracing_names import Names, collective_name, phases_of
from microddp.transport.base import Header
from microddp_kernels.operators import get_op
from tests.engine_tools import make_plan
from tests.tracing_tools import NUMEL

pytestmark = pytest.mark.timeout(30)


def header(algorithm: str, **changes: Any) -> Header:
    given = {"collective": "all_reduce", "op": "sum", "dtype": "float32", "shape": (NUMEL,), "row_nbytes": 4, **changes}
    return Header(sequence=0, algorithm=algorithm, root=0, slice_nbytes=64, **given)


def names(plan: Plan, algorithm: str) -> Names:
    return Names.of(plan, header(algorithm), get_op("sum"), None)


def stream_groups(plan: Plan, algorithm: str) -> list[str]:
    named = names(plan, algorithm)
    return [named.group(each.indices) for each in stream_program(plan).operations if isinstance(each, Group)]


@pytest.mark.parametrize(
    ("algorithm", "changes", "world_size", "text"),
    [
        ("ring", {"dtype": "bfloat16", "shape": (32 << 20,), "row_nbytes": 2}, 4, "all_reduce ring n=4 64MiB bf16"),
        ("direct in rank order", {}, 3, "all_reduce direct in rank order n=3 768B fp32"),
        ("tree", {"dtype": "float32 as float16", "shape": (3, 256), "row_nbytes": 2}, 2, None),
        ("all_gather", {"collective": "all_gather", "dtype": "int64", "shape": (1 << 27,), "row_nbytes": 8}, 2, None),
        ("naive", {"dtype": "float8_e4m3fn", "shape": (0,), "row_nbytes": 1}, 8, "all_reduce naive n=8 0B fp8_e4m3fn"),
    ],
)
def test_collective_name(algorithm: str, changes: dict[str, Any], world_size: int, text: str | None) -> None:
    known = {"tree": "all_reduce tree n=2 1.5KiB fp32 as fp16", "all_gather": "all_gather n=2 1GiB int64"}
    assert collective_name(header(algorithm, **changes), world_size) == f"microddp/{text or known[algorithm]}"


def test_groups_of_the_ring_step_by_step() -> None:
    plan = make_plan("ring", 0, 4, NUMEL, is_hoisted=False)
    found = stream_groups(plan, "ring")
    places = [f"{phase} step {step}/3 slice" for phase in ("scatter-reduce", "all-gather") for step in (1, 2, 3)]
    assert found == [f"{place} {piece}/3 send→1 recv←3" for place in places for piece in (1, 2, 3)]


def test_what_a_host_posts_together_and_combines() -> None:
    plan = make_plan("ring", 1, 3, 48, num_slots=2)  # hoisted; three chunks of one slice
    named = names(plan, "ring")
    found = [named.group(each.indices) if each.is_post else named.kernel(each.indices[0]) for each in host_issues(plan)]
    assert found == [
        "scatter-reduce step 1/2 slice 1/1 send→2 recv←0; scatter-reduce step 2/2 slice 1/1 recv←0",
        "all-gather step 1/2 slice 1/1 recv←0",  # into the chunk that the first message was sent from
        "combine sum",
        "scatter-reduce step 2/2 slice 1/1 send→2",
        "all-gather step 2/2 slice 1/1 recv←0",
        "combine sum",
        "all-gather step 1/2 slice 1/1 send→2",
        "all-gather step 2/2 slice 1/1 send→2",
    ]


@pytest.mark.parametrize(
    ("algorithm", "world_size", "numel", "found"),
    [
        ("tree", 3, 16, ["reduce step 1/1 slice 1/1 recv←1,2", "broadcast step 1/1 slice 1/1 send→1,2"]),
        (
            "ring",
            2,
            32,
            [
                "scatter-reduce step 1/1 slice 1/1 send→1 recv-combine←1",
                "all-gather step 1/1 slice 1/1 recv←1",
                "all-gather step 1/1 slice 1/1 send→1",
            ],
        ),
    ],
)
def test_several_peers_and_fused_receives(algorithm: str, world_size: int, numel: int, found: list[str]) -> None:
    plan = make_plan(algorithm, 0, world_size, numel, fuse=True)
    named = names(plan, algorithm)
    assert [named.group(each.indices) for each in host_issues(plan) if each.is_post] == found


@pytest.mark.parametrize(
    ("algorithm", "order", "rank", "phases"),
    [
        ("ring", None, 0, [("scatter-reduce", 0, 3), ("all-gather", 3, 6)]),
        ("direct", None, 3, [("scatter-reduce", 0, 1), ("all-gather", 1, 2)]),
        ("tree", None, 0, [("reduce", 0, 2), ("broadcast", 2, 4)]),
        ("naive", None, 3, [("reduce", 0, 3), ("broadcast", 3, 6)]),  # this rank itself never folds
        ("full_ring", None, 0, [("reduce", 0, 3)]),
        ("full_ring", "rank", 0, [("reduce", 0, 3)]),  # folds at the very end only
        ("reduce_scatter", None, 0, [("scatter-reduce", 0, 3)]),
        ("all_gather", None, 0, [("all-gather", 0, 3)]),
        ("broadcast", None, 1, [("broadcast", 0, 2)]),
        ("reduce", None, 1, [("reduce", 0, 2)]),
    ],
)
def test_phases(algorithm: str, order: str | None, rank: int, phases: list[tuple[str, int, int]]) -> None:
    plan = make_plan(algorithm, rank, 4, 64, order=order, num_slots=8)
    label = f"{algorithm} in rank order" if order else algorithm
    assert [tuple(each) for each in phases_of(header(label), plan)] == phases


def test_phases_of_an_algorithm_that_nobody_registered() -> None:
    plan = make_plan("ring", 0, 4, 64)
    assert [tuple(each) for each in phases_of(header("any"), plan)] == [("reduce", 0, 3), ("copy", 3, 6)]


def test_kernels_by_verb_and_operator() -> None:
    buffers = Buffer("data", 96), Buffer("wire", 96), Buffer("A", 16), Buffer("acc", 16, wide=True)
    data, wire, slot, wide = (Span(number, 0, 4) for number in range(4))
    types = (LaneTypes(torch.float32, torch.bfloat16, torch.float64),)

    def name(instruction: Any, op: str = "sum", types: tuple[LaneTypes, ...] | None = types) -> str:
        made = Plan(0, 3, 96, 2, buffers, (instruction,), ((),), 16)
        return Names.of(made, header("direct"), get_op(op), types).kernel(0)

    assert name(Combine(0, 0, data, (data, wire))) == "combine sum"
    assert name(Combine(0, 0, data, (data, wire), weights=(1, 2)), "avg") == "fold avg"
    assert name(Combine(0, 0, data, (data, wire), divisor=3), "avg") == "fold avg"
    assert name(Combine(0, 0, data, (data, wire, wire)), "max") == "fold max"
    assert name(Copy(0, 0, wire, data)) == "convert float32→bfloat16"
    assert name(Copy(0, 0, data, wire)) == "convert bfloat16→float32"
    assert name(Copy(0, 0, wide, data)) == "convert float32→float64"
    assert name(Copy(0, 0, slot, wire)) == "copy"
    assert name(Copy(0, 0, wire, data), types=None) == "copy"
    two = (*types, LaneTypes(torch.int64, torch.int64, torch.int64))
    assert name(Copy(0, 0, wire, data), types=two) == "convert float32→bfloat16, copy"
    with pytest.raises(TypeError, match="is no kernel"):
        name(Send(0, 0, 1, data))

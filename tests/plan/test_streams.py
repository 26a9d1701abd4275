"""Stream programs: free from races alone and one after another, with no event too many, too early or too late."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest

from microddp.errors import PlanError
from microddp.plan import (
    LoweringConfig,
    StreamProgram,
    check_streams,
    find_sequence_races,
    find_stream_races,
    hoist,
    lower,
    stream_program,
)
from microddp.plan.instructions import (
    Recv,
    Send,
    Span,
)
from microddp.plan.stream_hazards import collisions
from microddp.plan.streams import Group, Launch, Record, Wait
from microddp.schedule import Schedule, schedule
from tests.plan.cells import THOROUGH
from tests.plan.stream_tools import (
    CALLER,
    GROUPS,
    KERNELS,
    indices_of,
    is_work,
    moved,
    plan_of,
    sampled_programs,
    stream_of,
    without,
)
from tests.schedule.reference import every_schedule, label

pytestmark = pytest.mark.timeout(3600 if THOROUGH else 60)

ARITHMETIC: tuple[dict[str, bool], ...] = ({}, {"wire": True}, {"wide": True}, {"wire": True, "wide": True})


@lru_cache(maxsize=1)
def sample() -> list[StreamProgram]:
    """Programs of every algorithm on two to five ranks, none of them empty."""
    return [each for each in sampled_programs(range(2, 6), 6) if each.operations]


def ring(slice_nbytes: int = 16, rank: int = 0, world_size: int = 2) -> StreamProgram:
    numel = 4 * world_size * 3
    return stream_program(lower(schedule("ring", world_size), rank, numel, 4, LoweringConfig(slice_nbytes)))


def test_a_program_in_full() -> None:
    """Two ranks, one slice:  GROUPS   swap chunks ┐       ┌ swap results ┐
    .                         KERNELS              └ combine ┘            └ (done)"""
    assert ring(1 << 20).operations == (
        Record(0, CALLER),
        Wait(0, KERNELS),
        Record(1, KERNELS),
        Wait(1, GROUPS),
        Group((0, 1)),
        Record(2, GROUPS),
        Wait(2, KERNELS),
        Launch(2),
        Record(3, KERNELS),
        Wait(3, GROUPS),
        Group((3, 4)),
        Record(4, GROUPS),
        Wait(4, KERNELS),
    )


def test_no_instructions_no_operations() -> None:
    plan = lower(schedule("ring", 2), 0, 0, 4, LoweringConfig(16))
    assert stream_program(plan) == StreamProgram(plan, (), 0)
    assert find_stream_races(stream_program(plan)) == []


def test_kernels_only_need_no_event_but_the_first() -> None:
    plan = lower(schedule("ring", 1), 0, 8, 4, LoweringConfig(16, alone=True, divides=True))
    assert stream_program(plan).operations == (Record(0, CALLER), Wait(0, KERNELS), Launch(0), Launch(1))


def test_every_program_is_well_made() -> None:
    """Free from races; all is played once, on its stream, in the plan's order; one record a place, each awaited."""
    for program in sample():
        check_streams(program)
        played = [each for one in program.operations if is_work(one) for each in indices_of(one)]
        assert sorted(played) == list(range(len(program.plan.instructions)))
        events = [each.event for each in program.operations if isinstance(each, Record)]
        assert events == list(range(program.num_events))
        assert set(events) == {each.event for each in program.operations if isinstance(each, Wait)}
        for stream in (CALLER, GROUPS, KERNELS):
            mine = [each for each in program.operations if stream_of(each) is stream]
            assert not any(isinstance(a, Record) and isinstance(b, Record) for a, b in pairwise(mine))
            assert not any(isinstance(a, Wait) and isinstance(b, Wait) for a, b in pairwise(mine))
        assert [each for each in program.operations if stream_of(each) is CALLER] == [Record(0, CALLER)]


def test_groups_are_all_transfers_of_one_step_and_slice() -> None:
    num_joined = 0
    for program in sample():
        plan = program.plan
        keys = []
        for each in stream_program(plan).operations:
            if isinstance(each, Group):
                here = {(plan.instructions[index].step, plan.instructions[index].slice) for index in each.indices}
                assert len(here) == 1
                keys += [*here]
                num_joined += len(each.indices) > 1
        assert len(keys) == len(set(keys))
    assert num_joined > 100


@pytest.mark.parametrize("each", [each for n in (2, 3, 4, 5) for each in every_schedule(n)], ids=label)
def test_no_wait_can_be_spared(each: Schedule, num_waits: Counter[str]) -> None:
    """Without any single one of them there is a race; with all there is none."""
    n, missed = each.world_size, []
    numel = 20 * n if each.collective in ("reduce_scatter", "all_gather") else 20 * each.num_chunks + 1
    ranks = range(n) if THOROUGH else sorted({0, n // 2, n - 1})
    for number, arithmetic in enumerate(ARITHMETIC):
        for slice_nbytes in (16, 32, 48, 1 << 20) if THOROUGH else ((16, 1 << 20), (32,))[number % 2]:
            for rank in ranks:
                plan = lower(each, rank, numel, 4, LoweringConfig(slice_nbytes, **arithmetic))
                program = stream_program(plan, max_group=(256, 4)[number % 2])
                collide = collisions(plan)
                assert find_stream_races(program, collide) == []
                for at, operation in enumerate(program.operations):
                    if isinstance(operation, Wait):
                        num_waits["tried"] += 1
                        num_waits["needed"] += bool(find_stream_races(without(program, at), collide))
                        if num_waits["needed"] < num_waits["tried"]:
                            missed.append((rank, arithmetic, slice_nbytes, at, operation))
    assert not missed


@pytest.fixture(scope="module")
def num_waits() -> object:
    """Counts waits; printed at the end (pytest -s)."""
    counts: Counter[str] = Counter()
    yield counts
    print(f"\nwaits of stream programs: {counts['tried']} tried, {counts['needed']} necessary")


def test_waits_are_late_and_records_early() -> None:
    """A wait moved behind the next work of its stream is a race, and so is a record before the last work of its."""
    num_moved = Counter[type]()
    for program in sample()[::3]:
        collide = collisions(program.plan)
        for at, each in enumerate(program.operations):
            if not isinstance(each, (Record, Wait)):
                continue
            mine = [
                place
                for place, other in enumerate(program.operations)
                if is_work(other) and stream_of(other) is each.stream and (place > at) is isinstance(each, Wait)
            ]
            if mine:
                changed = moved(program, at, mine[0] if isinstance(each, Wait) else mine[-1])
                num_moved[type(each)] += 1
                assert find_stream_races(changed, collide), (at, each)
    assert min(num_moved[Record], num_moved[Wait]) > 200, num_moved


def test_programs_may_follow_each_other() -> None:
    """Any two of the matrix, with the same staging and callers on streams of their own."""
    chance = random.Random(0)
    num_shared = 0
    for _ in range(400):
        first, second = chance.sample(sample(), 2)
        assert find_sequence_races(first, second) == []
        num_shared += len(first.plan.buffers) > 1 and len(second.plan.buffers) > 1
    assert num_shared > 100
    empty = stream_program(lower(schedule("ring", 2), 0, 0, 4, LoweringConfig(16)))
    assert find_sequence_races(empty, sample()[-1]) == find_sequence_races(sample()[-1], empty) == []


def test_transfers_that_depend_on_each_other_cannot_be_a_group() -> None:
    receive, again, send = (
        Recv(2, 1, 0, Span(1, 0, 4)),
        Recv(2, 1, 0, Span(1, 4, 8)),
        Send(2, 1, 2, Span(1, 2, 4)),  # forwards what the first receives
    )
    with pytest.raises(PlanError) as caught:
        stream_program(plan_of(receive, again, send))
    assert str(caught.value) == (
        "rank 1: the transfers of step 2 slice 1 cannot be one group: instruction 2 depends on instruction 0"
    )
    program = stream_program(plan_of(receive, again, replace(send, step=3)))
    groups = [each for each in program.operations if is_work(each)]
    assert groups == [Group((0, 1)), Group((2,))]


def test_transfers_of_a_step_must_stand_together() -> None:
    with pytest.raises(
        PlanError, match="rank 0: the transfers of step 0 slice 2 do not stand together; .* not hoisted"
    ):
        stream_program(hoist(lower(schedule("ring", 3), 0, 200, 4, LoweringConfig(16))))


def test_bad_arguments() -> None:
    plan = ring().plan
    with pytest.raises(ValueError, match="num_lanes must be at least 1, not 0"):
        stream_program(plan, num_lanes=0)
    with pytest.raises(ValueError, match=r"max_group must be at least 2 \* num_lanes = 6, not 5"):
        stream_program(plan, max_group=5, num_lanes=3)

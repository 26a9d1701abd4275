"""All ranks' stream programs together: their messages match and no ranks wait for each other in a cycle."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from microddp.errors import PlanError
from microddp.plan import LoweringConfig, Plan, StreamProgram, check_ranks, check_streams, lower, stream_program
from microddp.plan.instructions import Recv, Send
from microddp.plan.streams import Group, Wait
from microddp.schedule import schedule
from tests.plan.cells import THOROUGH
from tests.plan.stream_tools import (
    comes_to_an_end,
    disturbed,
    exchange_plans,
    groups_at,
    is_split,
    moved,
    one_by_one,
    receives_first,
    regrouped,
)
from tests.schedule.reference import every_schedule

pytestmark = pytest.mark.timeout(1800 if THOROUGH else 60)

SLICES = (16, 48, 1 << 20)
GROUPS_OF = (256, 4)


@pytest.mark.parametrize("world_size", range(2, 17))
def test_no_ranks_wait_in_a_cycle(world_size: int) -> None:
    """Every algorithm, three sizes of slices, groups of up to 256 and of up to 4.

    Above eight ranks each algorithm with one of these six in turn, unless the run is thorough.
    """
    tried: Counter[tuple[int, int]] = Counter()
    num_split = 0
    for number, each in enumerate(every_schedule(world_size, roots=(world_size // 2,))):
        num_chunks = world_size if each.collective in ("reduce_scatter", "all_gather") else each.num_chunks
        numel = num_chunks * (28 if world_size <= 8 else 16)
        combinations = list(product(SLICES, GROUPS_OF))
        if world_size > 8 and not THOROUGH:
            combinations = [combinations[(number + world_size) % 6]]
            combinations += [(16, 4)] * (each.algorithm == "direct")  # whose groups are the largest
        for slice_nbytes, max_group in combinations:
            config = LoweringConfig(slice_nbytes, wire=number % 2 == 0)
            programs = [
                stream_program(lower(each, rank, numel, 4, config), max_group=max_group) for rank in range(world_size)
            ]
            check_ranks(programs)
            tried[slice_nbytes, max_group] += 1
            num_split += any(map(is_split, programs))
    assert len(tried) == len(SLICES) * len(GROUPS_OF)
    assert (num_split > 0) is (world_size > 3)  # ``direct``: 2(n-1) transfers in a step


def ring(world_size: int = 3, slice_nbytes: int = 1 << 20, name: str = "ring") -> list[StreamProgram]:
    each = schedule(name, world_size)
    plans = [lower(each, rank, 8 * world_size, 4, LoweringConfig(slice_nbytes)) for rank in range(world_size)]
    return [stream_program(plan) for plan in plans]


def edited(program: StreamProgram, kind: type, number: int, **fields: Any) -> StreamProgram:
    """With the ``number``-th instruction of a kind changed; its operations stay as they are."""
    instructions = list(program.plan.instructions)
    index = [at for at, each in enumerate(instructions) if isinstance(each, kind)][number]
    instructions[index] = replace(instructions[index], **fields)
    return replace(program, plan=replace(program.plan, instructions=tuple(instructions)))


def with_victim(programs: list[StreamProgram], spoilt: StreamProgram, rank: int = 1) -> list[StreamProgram]:
    return [*programs[:rank], spoilt, *programs[rank + 1 :]]


def test_an_ungrouped_ring_is_a_cycle_through_all_ranks() -> None:
    """Every rank's send waits for a receive that is behind the next rank's send; nobody receives."""
    with pytest.raises(PlanError) as caught:
        check_ranks([one_by_one(each) for each in ring()])
    assert str(caught.value) == (
        "the ranks wait in a cycle: rank 0 group 0 (step 0 slice 0) waits for rank 1 group 1 (step 0 slice 0), which "
        "waits for rank 1 group 0 (step 0 slice 0), which waits for rank 2 group 1 (step 0 slice 0), which waits for "
        "rank 2 group 0 (step 0 slice 0), which waits for rank 0 group 1 (step 0 slice 0), which waits for rank 0 "
        "group 0 (step 0 slice 0)"
    )


@pytest.mark.parametrize("name", ["ring", "full_ring", "direct", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("spoil", [one_by_one, receives_first])
@pytest.mark.parametrize("world_size", [2, 5])
def test_ungrouped_steps_are_cycles(
    name: str, spoil: Callable[[StreamProgram], StreamProgram], world_size: int
) -> None:
    programs = ring(world_size, 16, name)
    check_ranks(programs)
    with pytest.raises(PlanError, match=r"cycle: rank \d group \d+ \(step \d+ slice \d+\) waits for rank \d group"):
        check_ranks([spoil(each) for each in programs])


def test_one_rank_that_does_not_group_is_no_cycle() -> None:
    """The others' groups are there for both of its messages: a chain, not a cycle."""
    programs = ring()
    check_ranks(with_victim(programs, one_by_one(programs[1])))


def test_groups_in_another_order_at_one_end() -> None:
    programs = ring(slice_nbytes=16)
    first, second = groups_at(programs[1])[:2]
    with pytest.raises(PlanError) as caught:
        check_ranks(with_victim(programs, moved(programs[1], second, first)))
    assert str(caught.value) == (
        "message 0 from rank 0 to rank 1 stands in different order at its ends: rank 0 group 0 (step 0 slice 0) sends "
        "what rank 1 group 0 (step 0 slice 1) receives"
    )


def test_swapped_groups_that_share_no_edge_are_a_cycle() -> None:
    """Rank 1 sends its tensor to rank 0 and gets the result back; here it wants the result first."""
    programs = ring(2, name="naive")
    first, second = groups_at(programs[1])
    with pytest.raises(PlanError) as caught:
        check_ranks(with_victim(programs, moved(programs[1], second, first)))
    assert str(caught.value) == (
        "the ranks wait in a cycle: rank 0 group 0 (step 0 slice 0) waits for rank 1 group 1 (step 0 slice 0), which "
        "waits for rank 1 group 0 (step 1 slice 0), which waits for rank 0 group 1 (step 1 slice 0), which waits for "
        "rank 0 group 0 (step 0 slice 0)"
    )


def test_a_wrong_peer_is_an_unmatched_message() -> None:
    programs = ring(4)
    spoilt = edited(programs[1], Send, 1, peer=3)
    with pytest.raises(PlanError) as caught:
        check_ranks(with_victim(programs, spoilt))
    assert str(caught.value) == (
        "rank 1 sends 5 messages to rank 2, which receives 6 of them: unmatched is message 1, that of rank 2 group 1 "
        "(step 1 slice 0)"
    )
    for peer in (-1, 1, 4):
        with pytest.raises(
            PlanError, match=rf"rank 1: instruction \d, Send\(.*has peer {peer}, which is no other of 4"
        ):
            check_ranks(with_victim(programs, edited(programs[1], Send, 1, peer=peer)))


def test_a_wrong_length_is_told() -> None:
    programs = ring()
    send = next(each for each in programs[1].plan.instructions if isinstance(each, Send))
    shorter = replace(send.source, stop=send.source.stop - 1)
    with pytest.raises(PlanError) as caught:
        check_ranks(with_victim(programs, edited(programs[1], Send, 0, source=shorter)))
    assert str(caught.value) == (
        "rank 1 group 0 (step 0 slice 0) sends 7 elements, rank 2 group 0 (step 0 slice 0) receives 8"
    )


def test_another_step_at_one_end_is_told() -> None:
    programs = ring()
    with pytest.raises(PlanError, match="message 3 from rank 1 to rank 2 is not the same at both ends"):
        check_ranks(with_victim(programs, edited(programs[1], Send, 3, step=7)))


def test_a_wait_for_what_is_recorded_later_is_malformed() -> None:
    programs = ring()
    number = next(at for at, each in enumerate(programs[1].operations) if isinstance(each, Wait))
    with pytest.raises(
        PlanError, match="rank 1: operation 0, Wait.* waits for an event that is not recorded before it"
    ):
        check_ranks(with_victim(programs, moved(programs[1], number, 0)))


def test_a_program_of_every_rank_is_needed() -> None:
    programs = ring()
    for wrong in ([], programs[:2], programs[::-1]):
        if wrong:
            with pytest.raises(ValueError, match=r"expected a program for each of \d ranks, got \(rank, world_size\)"):
                check_ranks(wrong)
    check_ranks([])


def test_programs_without_instructions_pass() -> None:
    each = schedule("ring", 3)
    check_ranks([stream_program(lower(each, rank, 0, 4, LoweringConfig(16))) for rank in range(3)])


@pytest.mark.parametrize("seed", range(12))
def test_large_groups_are_split_alike(seed: int) -> None:
    """Exchanges to no purpose, dense or sparse, where some ranks have to split a group and others have not."""
    chance = random.Random(seed)
    world_size = chance.randint(3, 9)
    plans = exchange_plans(world_size, chance, most=chance.choice((1, 1, 3)))
    for max_group, num_lanes in ((2, 1), (4, 1), (4, 2), (9, 2), (256, 1)):
        programs = [stream_program(plan, max_group=max_group, num_lanes=num_lanes) for plan in plans]
        check_ranks(programs)
        assert comes_to_an_end(programs)
        for program in programs:
            check_streams(program)
            for each in program.operations:
                assert not isinstance(each, Group) or len(each.indices) * num_lanes <= max_group


def test_groups_split_by_what_is_sent_and_received_are_a_cycle() -> None:
    """An obvious way to split: sends first, then receives, four at a time. It goes wrong, and the check sees it."""

    def cut(plan: Plan, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
        indices = tuple(sorted(indices, key=lambda index: isinstance(plan.instructions[index], Recv)))
        return [indices[start : start + 4] for start in range(0, len(indices), 4)]

    each = schedule("direct", 8)
    programs = [stream_program(lower(each, rank, 64, 4, LoweringConfig(256))) for rank in range(8)]
    check_ranks(programs)
    with pytest.raises(PlanError, match="the ranks wait in a cycle"):
        check_ranks([regrouped(program, cut) for program in programs])


def test_the_check_says_what_the_model_does() -> None:
    """Programs with a group cut in pieces, moved, or joined with another: the streams run through if it passes."""
    chance = random.Random(5)
    verdicts: Counter[bool] = Counter()
    for _ in range(300):
        world_size = chance.randint(2, 5)
        if chance.random() < 0.5:
            programs = ring(
                world_size, 16, chance.choice(("ring", "direct", "naive", "tree", "all_gather", "full_ring"))
            )
        else:
            plans = exchange_plans(world_size, chance, most=1)
            programs = [stream_program(plan, max_group=chance.choice((2, 4, 256))) for plan in plans]
        for rank in chance.sample(range(world_size), chance.randint(1, world_size)):
            programs[rank] = disturbed(programs[rank], chance)
        try:
            check_ranks(programs)
            passed = True
        except PlanError as error:
            if "cycle" not in str(error):
                continue
            passed = False
        assert comes_to_an_end(programs) is passed
        verdicts[passed] += 1
    assert min(verdicts[True], verdicts[False]) > 30, verdicts


def test_large_programs_are_checked_in_good_time() -> None:
    """About 9,000 groups of three ranks, no cycle: a second or so, minutes if it grew with their square."""
    each = schedule("ring", 3)
    started = time.process_time()
    plans = [lower(each, rank, 3 * 3 * 1000, 4, LoweringConfig(16)) for rank in range(3)]
    programs = [stream_program(plan) for plan in plans]
    check_ranks(programs)
    assert sum(len(groups_at(program)) for program in programs) > 8000
    assert time.process_time() - started < 15

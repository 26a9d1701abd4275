"""Dependencies: exactly those that the spans demand, none too many, found in time that grows with the plan."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from microddp.errors import PlanError
from microddp.plan import LoweringConfig, Plan, check_races, derive, find_races, hoist, lower
from microddp.plan.instructions import Buffer, Combine, Copy, Instruction, Recv, RecvCombine, Send, Span
from microddp.plan.issue import host_issues
from microddp.schedule import Schedule, schedule
from tests.schedule.reference import every_schedule, label

SAMPLE = [each for n in (2, 3, 4, 5) for each in every_schedule(n)]


def without(plan: Plan, index: int, dependency: int) -> Plan:
    kept = tuple(each for each in plan.after[index] if each != dependency)
    return replace(plan, after=(*plan.after[:index], kept, *plan.after[index + 1 :]))


@pytest.mark.parametrize("each", SAMPLE, ids=label)
def test_no_dependency_can_be_spared(each: Schedule) -> None:
    """Without any single one of them there is a race; with all there is none."""
    removed, n = 0, each.world_size
    numel = 9 * n if each.collective in ("reduce_scatter", "all_gather") else 9 * each.num_chunks + 1
    for slice_nbytes, fuse, wide in ((1 << 20, False, False), (16, False, True), (32, True, False)):
        config = LoweringConfig(slice_nbytes, fuse=fuse, wide=wide)
        for rank in sorted({0, 1, n - 1}):
            lowered = lower(each, rank, numel, 4, config)
            for plan in (lowered, hoist(lowered)):
                assert find_races(plan) == []
                for index, direct in enumerate(plan.after):
                    for dependency in direct:
                        races = find_races(without(plan, index, dependency))
                        assert (dependency, index) in {(race.first, race.second) for race in races}, (index, dependency)
                        removed += 1
    assert removed > 0 or each.collective in ("all_gather", "broadcast")


def random_span(chance: random.Random) -> Span:
    start = chance.randrange(12)
    return Span(chance.randrange(2), start, start + chance.randint(1, 8))


def random_instruction(chance: random.Random) -> Instruction:
    first, second, third = (random_span(chance) for _ in range(3))
    return chance.choice(
        (
            Send(0, 0, 1, first),
            Recv(0, 0, 1, first),
            RecvCombine(0, 0, 1, first, (second, None)),
            Combine(0, 0, first, (second, third)),
            Copy(0, 0, first, second),
        )
    )


def touched(instruction: Instruction) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(read, written) elements, written down here once more, element by element."""
    sources: Sequence[Span | None]
    sources = [instruction.source] if isinstance(instruction, (Send, Copy)) else getattr(instruction, "operands", [])
    read = {(span.buffer, at) for span in sources if span for at in range(span.start, span.stop)}
    out = None if isinstance(instruction, Send) else instruction.out
    return read, {(out.buffer, at) for at in range(out.start, out.stop)} if out else set()


def closure(instructions: Sequence[Instruction]) -> list[set[int]]:
    """Everything that must come before each instruction, by comparing all pairs of elements."""
    before: list[set[int]] = []
    for index, instruction in enumerate(instructions):
        read, written = touched(instruction)
        mine: set[int] = set()
        for earlier in range(index):
            read_then, written_then = touched(instructions[earlier])
            if written_then & (read | written) or read_then & written:
                mine |= {earlier} | before[earlier]
        before.append(mine)
    return before


@pytest.mark.parametrize("seed", range(300))
def test_any_program_gets_the_transitive_reduction(seed: int) -> None:
    """Of random programs, all kinds of overlap included."""
    chance = random.Random(seed)
    program = [random_instruction(chance) for _ in range(chance.randint(1, 24))]
    before = closure(program)
    reduced = [tuple(sorted(each - {more for one in each for more in before[one]})) for each in before]
    assert list(derive(program)) == reduced
    plan = Plan(0, 2, 20, 4, (Buffer("data", 20), Buffer("A", 20)), tuple(program), derive(program), 4)
    assert find_races(plan) == []
    for index, direct in enumerate(plan.after):
        for dependency in direct:
            assert find_races(without(plan, index, dependency))


def test_races_name_the_instructions() -> None:
    program = (Recv(0, 0, 1, Span(1, 0, 4)), Send(1, 0, 1, Span(1, 2, 6)))
    plan = Plan(3, 4, 8, 4, (Buffer("data", 8), Buffer("A", 8)), program, ((), ()), 4)
    (race,) = find_races(plan)
    assert (race.first, race.second, race.span) == (0, 1, Span(1, 2, 4))
    with pytest.raises(PlanError, match=r"rank 3: 1 races; instructions 0 and 1: Recv\(.*\) and Send\("):
        check_races(plan)
    with pytest.raises(PlanError, match="rank 3: instruction 0 depends on 1, which is not an earlier one"):
        check_races(replace(plan, after=((1,), ())))


@pytest.mark.parametrize(("name", "world_size", "elements_a_slice"), [("ring", 8, 480), ("naive", 4, 425)])
def test_large_plans_are_made_in_good_time(name: str, world_size: int, elements_a_slice: int) -> None:
    """About 16,000 instructions: a second here, a minute if the time grows with their square."""
    started = time.process_time()
    plan = lower(schedule(name, world_size), 0, 4 * world_size * elements_a_slice, 4, LoweringConfig(16))
    issues = host_issues(hoist(plan))
    assert len(plan.instructions) > 15_000 and len(issues) > 3000
    assert time.process_time() - started < 15

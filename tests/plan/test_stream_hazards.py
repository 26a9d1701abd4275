"""The checker of stream programs: planted races and malformed programs are found, and nothing else is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from microddp.errors import PlanError
from microddp.plan import (
    LoweringConfig,
    StreamProgram,
    check_streams,
    find_sequence_races,
    find_stream_races,
    lower,
    stream_program,
)
from microddp.plan.instructions import Combine, Copy, Instruction, Recv, RecvCombine, Send, Span, is_transfer
from microddp.plan.stream_hazards import StreamRace
from microddp.plan.streams import Group, Launch, Operation, Record, StreamName, Wait
from microddp.schedule import schedule
from tests.plan.stream_tools import CALLER, GROUPS, KERNELS, indices_of, plan_of, stream_of, without

pytestmark = pytest.mark.timeout(60)

SLOT, DATA = Span(1, 0, 4), Span(0, 0, 4)


def ring() -> StreamProgram:
    """Two ranks, one slice: swap chunks, combine, swap results; 13 operations, 5 events."""
    return stream_program(lower(schedule("ring", 2), 0, 8, 4, LoweringConfig(16)))


def test_a_ring_has_no_race() -> None:
    assert find_stream_races(ring()) == [] and len(ring().operations) == 13
    check_streams(ring())


def test_groups_that_wait_for_the_caller_only_overlap_with_the_collective_before() -> None:
    """The first group of the second fills a slot that the last combine of the first may still read on KERNELS."""
    plan = plan_of(Send(0, 0, 2, Span(0, 8, 12)), Recv(0, 0, 0, SLOT), Combine(0, 0, DATA, (SLOT, DATA)))
    hasty = StreamProgram(
        plan,
        (Record(0, CALLER), Wait(0, GROUPS), Group((0, 1)), Record(1, GROUPS), Wait(1, KERNELS), Launch(2)),
        num_events=2,
    )
    signalled = replace(hasty, operations=(*hasty.operations, Record(2, KERNELS), Wait(2, CALLER)), num_events=3)
    right = stream_program(plan)
    for first in (hasty, signalled, right):  # the caller that was signalled is not the one of the second
        assert find_sequence_races(first, right) == []
        assert set(find_sequence_races(first, hasty)) == {(2, 1), (None, 1)}
    with pytest.raises(PlanError, match="rank 1: 2 races in the stream program; what came before it and instruction 0"):
        check_streams(hasty)


def test_an_end_that_does_not_wait_for_groups_overlaps_with_what_follows() -> None:
    open_end = without(ring(), 12)
    assert find_stream_races(open_end) == [StreamRace(3, None), StreamRace(4, None)]
    with pytest.raises(PlanError, match=r"2 races .*; instruction 3, Send\(.*\) and what comes after it"):
        check_streams(open_end)


def test_an_end_that_does_not_wait_for_groups_overlaps_with_the_next_collective() -> None:
    """A rank that forwards out of a slot last thing; the next collective's copy into that slot is on KERNELS."""
    forward = stream_program(plan_of(Recv(0, 0, 0, SLOT), Send(1, 0, 2, SLOT)))
    keep = stream_program(plan_of(Copy(0, 0, SLOT, DATA), Send(0, 0, 2, SLOT)))
    assert find_sequence_races(forward, keep) == []
    open_end = without(forward, len(forward.operations) - 1)
    assert set(find_sequence_races(open_end, keep)) == {(0, 0), (1, 0)}


def test_transfers_of_one_group_run_at_the_same_time() -> None:
    plan = plan_of(Recv(0, 0, 0, SLOT), Send(0, 0, 2, Span(1, 2, 6)))
    begin = (Record(0, CALLER), Wait(0, KERNELS), Record(1, KERNELS), Wait(1, GROUPS))
    end = (Record(2, GROUPS), Wait(2, KERNELS))
    together = StreamProgram(plan, (*begin, Group((0, 1)), *end), 3)
    assert find_stream_races(together) == [StreamRace(0, 1, Span(1, 2, 4))]
    apart = StreamProgram(plan, (*begin, Group((0,)), Group((1,)), *end), 3)
    assert find_stream_races(apart) == []


def test_the_wrong_order_is_a_race_even_if_it_is_an_order() -> None:
    """A combine that surely runs before the receive of its operand."""
    plan = plan_of(Recv(0, 0, 0, SLOT), Combine(0, 0, DATA, (SLOT, DATA)))
    begin = (Record(0, CALLER), Wait(0, KERNELS))
    work = (Launch(1), Record(1, KERNELS), Wait(1, GROUPS), Group((0,)), Record(2, GROUPS), Wait(2, KERNELS))
    assert find_stream_races(StreamProgram(plan, (*begin, *work), 3)) == [StreamRace(0, 1, SLOT)]


def malformed(change: Callable[[list[Operation]], object]) -> StreamProgram:
    operations = list(ring().operations)
    change(operations)
    return replace(ring(), operations=tuple(operations))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda each: each.pop(7), r"instruction 2, Combine\(.*\), is played 0 times"),
        (lambda each: each.append(Launch(2)), r"instruction 2, Combine\(.*\), is played 2 times"),
        (lambda each: each.append(Launch(5)), "operation 13, Launch.* names instruction 5; the plan has 5"),
        (lambda each: each.append(Group((-1,))), "names instruction -1"),
        (lambda each: each.append(Group(())), "is empty"),
        (lambda each: each.insert(7, Launch(3)), "operation 7, .* cannot play Send"),
        (lambda each: each.insert(7, Group((2,))), "operation 7, .* cannot play Combine"),
        (lambda each: each.pop(5), "operation 5, Wait.* waits for an event that is not recorded before it"),
        (lambda each: each.append(Record(2, KERNELS)), "is recorded for the second time"),
        (lambda each: each.append(Record(5, KERNELS)), "is not one of 5 events"),
    ],
)
def test_malformed_programs_are_told(change: Callable[[list[Operation]], object], text: str) -> None:
    with pytest.raises(PlanError, match=f"^rank 0: .*{text}"):
        check_streams(malformed(change))


def test_races_are_those_of_a_search_through_the_operations() -> None:
    """Random plans with random records and waits: the checker's verdict on each pair against a plain graph search."""
    chance = random.Random(3)
    verdicts: Counter[bool] = Counter()
    for _ in range(300):
        program = random_program(chance)
        races = {(race.first, race.second) for race in find_stream_races(program) if race.span}
        for second, later in enumerate(program.plan.instructions):
            for first, earlier in enumerate(program.plan.instructions[:second]):
                if collide(earlier, later):
                    ordered = reaches(program, first, second)
                    assert ((first, second) in races) is not ordered
                    verdicts[ordered] += 1
    assert min(verdicts[True], verdicts[False]) > 300, verdicts


def random_program(chance: random.Random) -> StreamProgram:
    def span() -> Span:
        start = chance.randrange(8)
        return Span(chance.randrange(2), start, start + chance.randint(1, 4))

    makers: list[Callable[[], Instruction]] = [
        lambda: Send(0, 0, 1, span()),
        lambda: Recv(0, 0, 1, span()),
        lambda: RecvCombine(0, 0, 1, span(), (span(), None)),
        lambda: Combine(0, 0, span(), (span(), span())),
        lambda: Copy(0, 0, span(), span()),
    ]
    plan = plan_of(*(chance.choice(makers)() for _ in range(8)))
    operations: list[Operation] = []
    num_events = 0
    index = 0
    while index < 8:
        if chance.random() < 0.4:
            operations.append(Record(num_events, chance.choice(tuple(StreamName))))
            num_events += 1
        if num_events and chance.random() < 0.4:
            operations.append(Wait(chance.randrange(num_events), chance.choice(tuple(StreamName))))
        size = 1
        if is_transfer(plan.instructions[index]):
            while size < 2 and index + size < 8 and is_transfer(plan.instructions[index + size]):
                size += 1
            operations.append(Group(tuple(range(index, index + size))))
        else:
            operations.append(Launch(index))
        index += size
    return StreamProgram(plan, tuple(operations), num_events)


def collide(earlier: Instruction, later: Instruction) -> bool:
    read_first, written_first = elements(earlier)
    read_later, written_later = elements(later)
    return bool(written_first & (read_later | written_later) or read_first & written_later)


def elements(instruction: Instruction) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(read, written), element by element."""
    single = [instruction.source] if isinstance(instruction, (Send, Copy)) else []
    sources = single if single else getattr(instruction, "operands", [])
    read = {(span.buffer, at) for span in sources if span for at in range(span.start, span.stop)}
    out = None if isinstance(instruction, Send) else instruction.out
    return read, {(out.buffer, at) for at in range(out.start, out.stop)} if out else set()


def reaches(program: StreamProgram, first: int, second: int) -> bool:
    """Whether there is a path from the operation of one instruction to another's, of streams and events."""
    operations = program.operations
    place = {index: at for at, each in enumerate(operations) for index in indices_of(each)}
    todo, seen = [place[first]], set[int]()
    while todo:
        here = todo.pop()
        for at in range(here + 1, len(operations)):
            one, other = operations[here], operations[at]
            by_stream = stream_of(one) is stream_of(other)
            by_event = isinstance(one, Record) and isinstance(other, Wait) and one.event == other.event
            if (by_stream or by_event) and at not in seen:
                seen.add(at)
                todo.append(at)
    return place[second] in seen

"""Reordering and issuing: nothing but the order changes, and it changes as meant."""

from __future__ import annotations

from collections import Counter

import pytest

from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.plan.instructions import DATA, Combine, Recv, RecvCombine, Send
from microddp.plan.issue import Issue, host_issues
from microddp.plan.passes import reorder
from microddp.schedule import schedule
from tests.plan.cells import cells

SAMPLE = [cell for cell in cells(range(2, 7), 6) if cell.numel]


def all_before(plan: Plan) -> list[set[int]]:
    """Everything that each instruction waits for, directly or not."""
    before: list[set[int]] = []
    for direct in plan.after:
        before.append(set(direct).union(*(before[each] for each in direct)))
    return before


def is_transfer(plan: Plan, index: int) -> bool:
    return isinstance(plan.instructions[index], (Send, Recv, RecvCombine))


def edges(plan: Plan) -> dict[tuple[int, bool], list[Send | Recv | RecvCombine]]:
    """(peer, whether sent) -> the transfers in the order in which they are issued."""
    found: dict[tuple[int, bool], list[Send | Recv | RecvCombine]] = {}
    for each in plan.instructions:
        if isinstance(each, (Send, Recv, RecvCombine)):
            found.setdefault((each.peer, isinstance(each, Send)), []).append(each)
    return found


def described(plan: Plan) -> Counter[object]:
    """Each instruction with the instructions that it waits for: what must not change."""
    named = plan.instructions
    return Counter(
        (named[index], tuple(sorted(map(repr, (named[each] for each in direct)))))
        for index, direct in enumerate(plan.after)
    )


def test_hoisting_changes_nothing_but_the_order() -> None:
    num_changed = 0
    for cell in SAMPLE:
        for rank in range(cell.schedule.world_size):
            plan = lower(cell.schedule, rank, cell.numel, cell.itemsize, cell.config())
            hoisted = hoist(plan)
            assert described(hoisted) == described(plan)
            assert edges(hoisted) == edges(plan)
            assert all(each < index for index, direct in enumerate(hoisted.after) for each in direct)
            assert (hoisted.buffers, hoisted.rank, hoisted.numel) == (plan.buffers, plan.rank, plan.numel)
            kept = [[each for each in one.instructions if isinstance(each, Combine)] for one in (plan, hoisted)]
            assert kept[0] == kept[1]
            num_changed += hoisted.instructions != plan.instructions
    assert num_changed > 100


def test_a_receive_over_sent_memory_is_posted_before_the_combine_of_that_step() -> None:
    """The first receive of the all-gather goes over the chunk that step 0 sent: it need not wait for step 0 to end."""
    plan = hoist(lower(schedule("ring", 2), 0, 64, 4, LoweringConfig(256)))
    assert [type(each).__name__ for each in plan.instructions] == ["Send", "Recv", "Recv", "Combine", "Send"]
    assert [each.step for each in plan.instructions] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("num_slots", [2, 3])
def test_the_next_receive_is_posted_before_the_combine(num_slots: int) -> None:
    """Slice k+1 arrives in the other slot while slice k is combined; slice k+2 right after slice k's slot is free."""
    plan = lower(schedule("ring", 4), 0, 160, 4, LoweringConfig(32, num_slots=num_slots))
    received, combined = places(plan, Recv), places(plan, Combine)
    assert all(later > combine for later, combine in zip(received[1:], combined))  # as lowered: one after the other
    received, combined = places(hoist(plan), Recv), places(hoist(plan), Combine)
    assert len(received) == len(combined) == 15
    for number, combine in enumerate(combined):
        assert all(ahead < combine for ahead in received[: number + num_slots])  # into this slot and the others
        if number + num_slots < len(received):  # into this slot again: after it is read, before the next combine
            assert combine < received[number + num_slots] < combined[number + 1]


def places(plan: Plan, kind: type[Recv] | type[Combine]) -> list[int]:
    """Where the receives into slots, or the combines, stand, by step and slice."""
    found = {}
    for index, each in enumerate(plan.instructions):
        if isinstance(each, kind) and (kind is Combine or each.out.buffer != DATA):
            found[each.step, each.slice] = index
    return [found[key] for key in sorted(found)]


def test_reorder_keeps_dependencies_between_the_same_instructions() -> None:
    plan = lower(schedule("ring", 2), 0, 8, 4, LoweringConfig(16))
    assert [type(each) for each in plan.instructions] == [Send, Recv, Combine, Send, Recv]
    swapped = reorder(plan, [1, 0, 2, 4, 3])
    assert described(swapped) == described(plan)
    assert swapped.instructions[0] == plan.instructions[1] and swapped.after[2] != ()


def check_every_instruction_once(plan: Plan, issues: tuple[Issue, ...]) -> None:
    issued = [index for issue in issues for index in issue.indices]
    assert sorted(issued) == list(range(len(plan.instructions)))
    before = all_before(plan)
    for issue in issues:
        assert issue.is_post == all(is_transfer(plan, index) for index in issue.indices)
        assert issue.is_post or len(issue.indices) == 1
        assert not any(before[index] & set(issue.indices) for index in issue.indices), issue
        assert not set(issue.waits) & set(issue.indices)


def test_host_issues_wait_for_all_they_depend_on() -> None:
    joined = 0
    for cell in SAMPLE:
        for plan in cell.plans():
            issues = host_issues(plan)
            check_every_instruction_once(plan, issues)
            assert [index for issue in issues for index in issue.indices] == list(range(len(plan.instructions)))
            before, waited, done = all_before(plan), set[int](), set[int]()
            for issue in issues:
                assert not waited & set(issue.waits), "waited for twice"
                assert set(issue.waits) <= done, "waits for what is not issued"
                assert all(is_transfer(plan, index) for index in issue.waits)
                waited |= set(issue.waits)
                for index in issue.indices:  # transfers are complete when waited for, the others when issued
                    assert all(each in waited if is_transfer(plan, each) else each in done for each in before[index])
                done |= set(issue.indices)
                joined += len(issue.indices) > 1
    assert joined > 100


def test_host_waits_for_no_more_than_needed() -> None:
    for cell in SAMPLE:
        for plan in cell.plans():
            before = all_before(plan)
            for issue in host_issues(plan):
                assert set(issue.waits) <= set().union(*(before[index] for index in issue.indices))


def test_both_ends_issue_their_groups_in_the_same_order() -> None:
    for cell in SAMPLE:
        if cell.hoisted:
            continue
        plans = cell.plans()
        for plan in plans:
            for (peer, is_send), transfers in edges(plan).items():
                theirs = edges(plans[peer])[plan.rank, not is_send]
                assert [(a.step, a.slice) for a in transfers] == [(b.step, b.slice) for b in theirs]

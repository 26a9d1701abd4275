"""Wrong lowerings, planted on purpose: the proof catches every one, the hazard checker hardly any.

Dependencies are derived from what the wrong program does, so that it is free from races and wrong all the same. That
is why a plan is proved and not only checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from microddp.errors import PlanError
from microddp.plan import LoweringConfig, Plan, check_races, derive, find_races, lower, prove
from microddp.plan.instructions import DATA, Combine, Instruction, Recv, Send, Span
from microddp.plan.proof import Mode
from microddp.schedule import Schedule, schedule

VICTIM = 1  # the rank whose plan is spoilt

Program = list[Instruction]

MODES: tuple[Mode, ...] = ("any", "host", "stream")


def find(program: Program, kind: type, number: int = 0, **fields: Any) -> int:
    """The index of the ``number``-th instruction of a kind with the given fields."""
    found = [
        index
        for index, each in enumerate(program)
        if isinstance(each, kind) and all(getattr(each, name) == value for name, value in fields.items())
    ]
    return found[number]


def field(program: Program, index: int, name: str) -> Any:
    return getattr(program[index], name)


def moved(program: Program, source: int, target: int) -> Program:
    program.insert(target, program.pop(source))
    return program


def changed(program: Program, index: int, **fields: Any) -> Program:
    program[index] = replace(program[index], **fields)
    return program


def shifted(span: Span, by: int = 1) -> Span:
    return Span(span.buffer, span.start + by, span.stop + by)


def delay_combine(program: Program) -> Program:
    """Past the send of the next step, which needs its result."""
    combine = find(program, Combine, step=0)
    return moved(program, combine, find(program, Send, step=1))


def step_major(program: Program) -> Program:
    return sorted(program, key=lambda each: each.step)


def read_other_slot(program: Program) -> Program:
    combine = find(program, Combine, step=0, slice=1)
    operands = field(program, combine, "operands")
    other = tuple(replace(each, buffer=3 - each.buffer) if each.buffer else each for each in operands)
    return changed(program, combine, operands=other)


def fill_other_slot(program: Program) -> Program:
    receive = find(program, Recv, step=0, slice=1)
    return changed(program, receive, out=replace(field(program, receive, "out"), buffer=1))


def wrong_weights(program: Program) -> Program:
    return changed(program, find(program, Combine, step=1), weights=(1, 1))


def no_weights(program: Program) -> Program:
    return changed(program, find(program, Combine, step=1), weights=None)


def no_divisor(program: Program) -> Program:
    return changed(program, find(program, Combine, divisor=3), divisor=None)


def early_divisor(program: Program) -> Program:
    return changed(program, find(program, Combine, divisor=None), divisor=3)


def other_divisor(program: Program) -> Program:
    return changed(program, find(program, Combine, divisor=3), divisor=2)


def divide_twice(program: Program) -> Program:
    last = find(program, Combine, divisor=3)
    program.insert(last + 1, program[last])
    return changed(program, last + 1, operands=(field(program, last, "out"),))


def off_by_one(kind: type, name: str) -> Callable[[Program], Program]:
    def spoil(program: Program) -> Program:
        index = find(program, kind, step=0)
        return changed(program, index, **{name: shifted(field(program, index, name))})

    return spoil


def short_by_one(program: Program) -> Program:
    index = find(program, Combine, step=0)
    combine = program[index]
    assert isinstance(combine, Combine)
    out, *operands = (replace(each, stop=each.stop - 1) for each in (combine.out, *combine.operands))
    return changed(program, index, out=out, operands=tuple(operands))


def skip_accumulator(program: Program) -> Program:
    """Partial folds go to the tensor, and are rounded there."""
    place = {each.slice: each.out for each in program if isinstance(each, Combine) and each.out.buffer == DATA}
    for index, each in enumerate(program):
        if isinstance(each, Combine):
            operands = [place[each.slice] if span.buffer == 3 else span for span in each.operands]
            program[index] = replace(each, out=place[each.slice], operands=tuple(operands))
    return program


def receive_too_early(program: Program) -> Program:
    """Into slot A for slice 2, before slice 0 is combined out of it."""
    return moved(program, find(program, Recv, step=0, slice=2), find(program, Combine, step=0, slice=0))


def other_group_order(program: Program) -> Program:
    """The slices of step 0 the other way round, on one end only."""
    return sorted(program, key=lambda each: (each.step, -each.slice if each.step == 0 else each.slice))


def forget_combine(program: Program) -> Program:
    del program[find(program, Combine, 1)]
    return program


def combine_twice(program: Program) -> Program:
    index = find(program, Combine)
    program.insert(index, program[index])
    return program


def swap_operands(program: Program) -> Program:
    index = find(program, Combine)
    return changed(program, index, operands=tuple(reversed(field(program, index, "operands"))))


def forget_receive(program: Program) -> Program:
    del program[find(program, Recv, 1)]
    return program


def send_stale_slot(program: Program) -> Program:
    """The first forward reads what the rank kept, not what arrived."""
    index = find(program, Send, step=1)
    return changed(program, index, source=replace(field(program, index, "source"), buffer=1))


@dataclass(frozen=True)
class Wrong:
    """A lowering of ``name`` over three ranks, and how the plan of one of them, or of all, is spoilt."""

    name: str
    spoil: Callable[[Program], Program]
    text: str
    modes: tuple[Mode, ...] = MODES
    rank: int = VICTIM
    everywhere: bool = False
    wide: bool = False
    divides: bool = False
    means: bool = False
    order: str | None = None

    @property
    def arithmetic(self) -> dict[str, bool]:
        return {"wide": self.wide, "divides": self.divides, "means": self.means}


MIXED = "the schedule says|twice|of the tensor together|holds nothing yet"

WRONG = [
    Wrong("ring", delay_combine, MIXED),
    Wrong("tree", swap_operands, "the schedule says", rank=0),
    Wrong("full_ring", step_major, MIXED, everywhere=True),
    Wrong("full_ring", send_stale_slot, MIXED),
    Wrong("ring", read_other_slot, MIXED),
    Wrong("ring", fill_other_slot, MIXED),
    Wrong("ring", wrong_weights, r"weighs its operands \(1, 1\); they cover \(2, 1\)", means=True, divides=True),
    Wrong("ring", no_weights, "a fold has no weights", means=True, divides=True),
    Wrong("ring", no_divisor, "the schedule says", divides=True),
    Wrong("ring", early_divisor, "divides by 3 too early", divides=True),
    Wrong("ring", other_divisor, "divides by 2 too early", divides=True),
    Wrong("ring", divide_twice, "the schedule says", divides=True),
    Wrong("naive", no_divisor, "the schedule says", divides=True, rank=0),
    Wrong("direct", divide_twice, "the schedule says", divides=True, wide=True),
    Wrong("ring", off_by_one(Combine, "out"), MIXED),
    Wrong("ring", off_by_one(Send, "source"), MIXED),
    Wrong("ring", off_by_one(Recv, "out"), "of a buffer of 4 elements"),
    Wrong("direct", off_by_one(Send, "source"), MIXED),
    # Nothing is folded here: only the comparison at the end can tell one element from the next.
    Wrong("all_gather", off_by_one(Send, "source"), "element 12 .* ends as x1 of element 13, the schedule says x1"),
    Wrong("broadcast", off_by_one(Send, "source"), "element 0 .* ends as x0 of element 1, the schedule", rank=0),
    Wrong("ring", short_by_one, MIXED),
    Wrong(
        "naive",
        skip_accumulator,
        r"ends as \(\(x0∘x1\)∘x2\) of element 0, the schedule says \(x0∘x1∘x2\)",
        rank=0,
        wide=True,
    ),
    Wrong("ring", receive_too_early, "meets"),
    Wrong("ring", other_group_order, "meets|deadlock"),
    Wrong("direct", other_group_order, "meets|deadlock"),
    Wrong("naive", other_group_order, "meets|deadlock"),
    Wrong("ring", forget_combine, MIXED),
    Wrong("ring", combine_twice, MIXED),
    Wrong("ring", swap_operands, "the schedule says"),
    Wrong("direct", swap_operands, "the schedule says"),
    Wrong("full_ring", swap_operands, "the schedule says", order="rank"),
    Wrong("ring", forget_receive, "meets|holds nothing yet"),
]


def lowered(wrong: Wrong) -> tuple[Schedule, list[Plan]]:
    each = schedule(wrong.name, 3, order=wrong.order)
    config = LoweringConfig(16, **wrong.arithmetic)
    return each, [lower(each, rank, 36, 4, config) for rank in range(3)]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.name}-{getattr(wrong.spoil, '__name__', '')}")
def test_the_proof_catches(wrong: Wrong) -> None:
    each, plans = lowered(wrong)
    for mode in wrong.modes:
        prove(each, plans, mode=mode, **wrong.arithmetic)
    for rank in range(3) if wrong.everywhere else (wrong.rank,):
        program = wrong.spoil(list(plans[rank].instructions))
        plans[rank] = replace(plans[rank], instructions=tuple(program), after=derive(program))
    for mode in wrong.modes:
        for seed in range(5):
            with pytest.raises(PlanError, match=wrong.text):
                prove(each, plans, mode=mode, seed=seed, **wrong.arithmetic)
    for plan in plans:
        check_races(plan)  # not one of them is a race


def test_the_checker_catches_a_receive_that_keeps_its_old_dependencies() -> None:
    """What the hazard checker is for: an order that no dependency enforces."""
    each = schedule("ring", 3)
    plan = lower(each, 0, 36, 4, LoweringConfig(16))
    receive = find(list(plan.instructions), Recv, step=0, slice=2)
    loose = replace(plan, after=(*plan.after[:receive], (), *plan.after[receive + 1 :]))
    races = [race for race in find_races(loose) if race.second == receive]
    assert races and all(race.span.buffer == field(list(plan.instructions), receive, "out").buffer for race in races)
    plans = [loose, *(lower(each, rank, 36, 4, LoweringConfig(16)) for rank in (1, 2))]
    prove(each, plans, mode="host")  # in issue order it happens to be right
    assert any(fails(each, plans, seed) for seed in range(50))


def fails(each: Schedule, plans: Sequence[Plan], seed: int) -> bool:
    try:
        prove(each, plans, seed=seed)
    except PlanError:
        return True
    return False

"""What makes a stream program well-formed, before anything is said about races or ranks."""

from __future__ import annotations

from collections import Counter

from microddp.errors import PlanError
from microddp.plan.instructions import is_transfer
from microddp.plan.streams import Group, Launch, Operation, Record, StreamProgram, Wait

__all__ = ["check_form"]


def check_form(program: StreamProgram) -> None:
    """Each instruction is played once and on the stream for its kind; each event is recorded once, then waited for.

    (To wait for an event that was never recorded is no error on a device: it orders nothing.)

    Raises:
        PlanError: it is not so; names the rank and the operation.
    """
    instructions = program.plan.instructions
    recorded: set[int] = set()
    played: Counter[int] = Counter()
    for number, each in enumerate(program.operations):
        fault = _fault(program, each, recorded)
        if fault:
            raise PlanError(f"rank {program.plan.rank}: operation {number}, {each}, {fault}")
        played.update(_indices(each))
        if isinstance(each, Record):
            recorded.add(each.event)
    for index, instruction in enumerate(instructions):
        if played[index] != 1:
            where = f"rank {program.plan.rank}: instruction {index}, {instruction},"
            raise PlanError(f"{where} is played {played[index]} times")


def _fault(program: StreamProgram, operation: Operation, recorded: set[int]) -> str | None:
    instructions = program.plan.instructions
    for index in _indices(operation):
        if not 0 <= index < len(instructions):
            return f"names instruction {index}; the plan has {len(instructions)}"
        if is_transfer(instructions[index]) is not isinstance(operation, Group):
            return f"cannot play {instructions[index]}"
    if isinstance(operation, Group) and not operation.indices:
        return "is empty"
    if isinstance(operation, Record):
        if not 0 <= operation.event < program.num_events:
            return f"is not one of {program.num_events} events"
        return "is recorded for the second time" if operation.event in recorded else None
    if isinstance(operation, Wait) and operation.event not in recorded:
        return "waits for an event that is not recorded before it"
    return None


def _indices(operation: Operation) -> tuple[int, ...]:
    if isinstance(operation, Group):
        return operation.indices
    return (operation.index,) if isinstance(operation, Launch) else ()

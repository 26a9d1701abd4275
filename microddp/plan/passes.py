"""Reorders a plan's instructions without changing what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from microddp.plan.dependencies import ancestors
from microddp.plan.instructions import Instruction, Plan, Send, Transfer, is_transfer

__all__ = ["hoist"]

_LOOKAHEAD = 64
"""How many transfers may be in flight ahead of their step: enough to hide latency, too few to exhaust a transport."""


def hoist(plan: Plan) -> Plan:
    """Issues each transfer as soon as what it depends on is known to be complete, never sooner.

    A receive is then posted just after its slot frees, while the combine before it still runs. Transfers of one
    direction between two ranks keep their order, so that both ends still match. Nothing is hoisted that would make the
    host wait for what it need not have by then: a transfer that depends on another transfer moves only once some
    combine has had to wait for that one. The exception: a receive over memory that this step, or an earlier one, sends.
    The step cannot end before that send has, and a peer sends sooner to a receive that is there already.
    """
    return reorder(plan, _hoisted_order(plan.instructions, plan.after))


def reorder(plan: Plan, order: Sequence[int]) -> Plan:
    """The plan with its instructions in the given order of their old indices, the same dependencies between them."""
    new_index = {old: new for new, old in enumerate(order)}
    return replace(
        plan,
        instructions=tuple(plan.instructions[old] for old in order),
        after=tuple(tuple(sorted(new_index[each] for each in plan.after[old])) for old in order),
    )


def _hoisted_order(instructions: Sequence[Instruction], after: Sequence[Sequence[int]]) -> list[int]:
    before = ancestors(after)
    order: list[int] = []
    emitted = known = 0  # bit masks: issued; known to be complete when the host gets here
    transfers = [index for index, each in enumerate(instructions) if is_transfer(each)]
    first = 0  # the first transfer not issued yet, in ``transfers``
    sends = _mask([index for index in transfers if isinstance(instructions[index], Send)])
    for index, instruction in enumerate(instructions):
        if emitted >> index & 1:
            continue
        ready, blocked = [], set()
        sent = sends & emitted & ((1 << index) - 1)  # this step's and earlier ones'
        while first < len(transfers) and emitted >> transfers[first] & 1:
            first += 1
        for candidate in transfers[first : first + _LOOKAHEAD]:
            edge = _edge(instructions[candidate])
            if emitted >> candidate & 1:
                continue
            missing = before[candidate] & ~known
            if edge not in blocked and not (missing & ~sent if _is_receive(instructions[candidate]) else missing):
                ready.append(candidate)
                known |= missing
            else:
                blocked.add(edge)
        if is_transfer(instruction) and index not in ready:
            ready.append(index)  # it is its turn: the host waits here for what it depends on
            known |= before[index]
        elif not is_transfer(instruction):
            known |= before[index] | 1 << index
            order.extend(ready)
            emitted |= _mask(ready)
            ready = [index]
        order.extend(ready)
        emitted |= _mask(ready)
    return order


def _edge(instruction: Instruction) -> tuple[int, bool]:
    assert isinstance(instruction, Transfer)
    return instruction.peer, isinstance(instruction, Send)


def _is_receive(instruction: Instruction) -> bool:
    return is_transfer(instruction) and not isinstance(instruction, Send)


def _mask(indices: Sequence[int]) -> int:
    mask = 0
    for each in indices:
        mask |= 1 << each
    return mask

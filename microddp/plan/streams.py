"""A plan as a program for two streams of a device: groups of transfers, launches of kernels, and the events between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from microddp.errors import PlanError
from microddp.plan.instructions import Instruction, Plan, Recv, RecvCombine, Send, is_transfer

__all__ = ["Group", "Launch", "Operation", "Record", "StreamName", "StreamProgram", "Wait", "stream_program"]


class StreamName(Enum):
    """The streams of a program: the caller's, and a transport's own two."""

    CALLER = "caller"
    GROUPS = "groups"
    KERNELS = "kernels"


@dataclass(frozen=True, slots=True)
class Group:
    """Transfers that are enqueued together on GROUPS, all lanes of each."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A Combine or a Copy, enqueued on KERNELS."""

    index: int


@dataclass(frozen=True, slots=True)
class Record:
    """Makes ``event`` stand for everything enqueued on ``stream`` so far."""

    event: int
    stream: StreamName


@dataclass(frozen=True, slots=True)
class Wait:
    """What is enqueued on ``stream`` from now on starts after ``event``."""

    event: int
    stream: StreamName


Operation = Group | Launch | Record | Wait


@dataclass(frozen=True)
class StreamProgram:
    """What a host enqueues, in this order and without ever blocking, to play a plan.

    Each stream runs its own operations in order; two streams are ordered only by events. An event is recorded once.

    * At the beginning KERNELS waits for CALLER, where the tensor becomes ready, and GROUPS for KERNELS. So everything
      starts after whatever was enqueued on KERNELS before: the collective before this one, which uses the same staging
      and may have had another caller's stream.
    * At the end KERNELS waits for GROUPS. So everything is complete before whatever is enqueued on KERNELS next.
    * CALLER appears only in the first operation. To give it the result, record an event on KERNELS after the program,
      and after what is still to be done there, and make CALLER wait for it.

    Attributes:
        plan: what is played; operations name its instructions by their index.
        operations: none if the plan has no instructions.
        num_events: events are numbered from 0 to this.
    """

    plan: Plan
    operations: tuple[Operation, ...]
    num_events: int


def stream_program(plan: Plan, *, max_group: int = 256, num_lanes: int = 1) -> StreamProgram:
    """Compiles a plan as it was lowered, not hoisted.

    The transfers of one step and slice are one group, so that both ends of each agree on it. An event is recorded only
    where a dependency crosses from one stream to the other and no earlier one implies it; as early as possible, and
    waited for as late as possible.

    Args:
        plan: one rank's.
        max_group: transfers in a group, counting lanes; groups of more are split, see ``_parts``.
        num_lanes: transfers of each instruction.

    Raises:
        PlanError: a step's transfers depend on each other, or do not stand together (as in a hoisted plan).
        ValueError: a group cannot hold one send and one receive.
    """
    if num_lanes < 1:
        raise ValueError(f"num_lanes must be at least 1, not {num_lanes}")
    if max_group < 2 * num_lanes:
        raise ValueError(f"max_group must be at least 2 * num_lanes = {2 * num_lanes}, not {max_group}")
    work = _work(plan, max_group, num_lanes)
    return StreamProgram(plan, *_emit(work, _waits(plan, work))) if work else StreamProgram(plan, (), 0)


Place = tuple[StreamName, int]
"""A stream, and how many pieces of work are enqueued there: what an event stands for."""


def _work(plan: Plan, max_group: int, num_lanes: int) -> list[Group | Launch]:
    work: list[Group | Launch] = []
    grouped = set()
    for key, run in groupby(range(len(plan.instructions)), lambda index: _group_key(plan, index)):
        indices = tuple(run)
        if len(key) == 1:
            work.append(Launch(*indices))
            continue
        where = f"rank {plan.rank}: the transfers of step {key[0]} slice {key[1]}"
        if key in grouped:
            raise PlanError(f"{where} do not stand together; streams take plans as they are lowered, not hoisted")
        grouped.add(key)
        for index in indices:
            if set(plan.after[index]) & set(indices):
                needed = max(set(plan.after[index]) & set(indices))
                raise PlanError(f"{where} cannot be one group: instruction {index} depends on instruction {needed}")
        work += [Group(part) for part in _parts(plan, indices, max_group, num_lanes)]
    return work


def _group_key(plan: Plan, index: int) -> tuple[int, ...]:
    """(step, slice) of a transfer; (index,) of anything else."""
    instruction = plan.instructions[index]
    return (instruction.step, instruction.slice) if is_transfer(instruction) else (index,)


def _parts(plan: Plan, indices: tuple[int, ...], max_group: int, num_lanes: int) -> list[tuple[int, ...]]:
    """Cuts a group that is too large so that both ends of a message put it into a part of the same name.

    A name is (which message of the edge, block of distances), where the distance is from source to target around the
    ring of ranks; every rank goes through the names in the same order. The send over a distance and the receive over
    it stay together: apart, a ring of ranks would wait for itself. A rank whose group is small enough does it at once,
    which is as good: its messages are there whenever the other end's part is.
    """
    if len(indices) * num_lanes <= max_group:
        return [indices]
    block = max_group // (2 * num_lanes)  # distances: a send and a receive each
    parts: dict[tuple[int, int], list[int]] = {}
    seen: Counter[tuple[int, bool]] = Counter()
    for index in indices:
        peer, is_send = _end(plan.instructions[index])
        distance = (peer - plan.rank if is_send else plan.rank - peer) % plan.world_size
        parts.setdefault((seen[peer, is_send], (distance - 1) // block), []).append(index)
        seen[peer, is_send] += 1
    return [tuple(parts[name]) for name in sorted(parts)]


def _end(instruction: Instruction) -> tuple[int, bool]:
    """The peer of a transfer, and whether it is sent to."""
    assert isinstance(instruction, (Send, Recv, RecvCombine))
    return instruction.peer, isinstance(instruction, Send)


def _waits(plan: Plan, work: Sequence[Group | Launch]) -> list[Place | None]:
    """For each piece of work, and for the end, the place on the other stream that must be waited for, if any.

    As there are two streams, what else a wait implies is earlier work of the waiting stream itself, so that one number
    for each stream says what it has waited for.
    """
    place_of: dict[int, Place] = {}
    position = {StreamName.GROUPS: 0, StreamName.KERNELS: 0}
    known = {StreamName.GROUPS: -1, StreamName.KERNELS: 0}  # GROUPS must wait for KERNELS to have begun
    waits: list[Place | None] = []

    def wait(stream: StreamName, other: StreamName, needed: int) -> Place | None:
        if needed <= known[stream]:
            return None
        known[stream] = needed
        return other, needed

    for each in work:
        stream, other = _streams(each)
        indices = _indices(each)
        needed = [place_of[before] for index in indices for before in plan.after[index]]
        waits.append(wait(stream, other, max((at for where, at in needed if where is other), default=0)))
        position[stream] += 1
        place_of.update(dict.fromkeys(indices, (stream, position[stream])))
    waits.append(wait(StreamName.KERNELS, StreamName.GROUPS, position[StreamName.GROUPS]))
    return waits


def _emit(work: Sequence[Group | Launch], waits: Sequence[Place | None]) -> tuple[tuple[Operation, ...], int]:
    """Puts records and waits around the work; returns that and the number of events."""
    awaited = set(waits)
    events: dict[Place, int] = {(StreamName.CALLER, 0): 0}
    position = {StreamName.GROUPS: 0, StreamName.KERNELS: 0}
    out: list[Operation] = [Record(0, StreamName.CALLER), Wait(0, StreamName.KERNELS)]

    def record(stream: StreamName) -> None:
        place = stream, position[stream]
        if place in awaited:
            events[place] = len(events)
            out.append(Record(events[place], stream))

    record(StreamName.KERNELS)
    for each, place in zip(work, waits):
        stream, _ = _streams(each)
        if place:
            out.append(Wait(events[place], stream))
        out.append(each)
        position[stream] += 1
        record(stream)
    if waits[-1]:
        out.append(Wait(events[waits[-1]], StreamName.KERNELS))
    return tuple(out), len(events)


def _streams(each: Group | Launch) -> tuple[StreamName, StreamName]:
    """The stream of a piece of work, and the other one."""
    both = StreamName.GROUPS, StreamName.KERNELS
    return both if isinstance(each, Group) else both[::-1]


def _indices(each: Group | Launch) -> tuple[int, ...]:
    return each.indices if isinstance(each, Group) else (each.index,)

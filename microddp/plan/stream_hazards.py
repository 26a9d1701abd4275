"""Checks that stream programs are free from races, without the compiler and without a plan's own dependencies.

What happens before what is taken from the operations alone: a stream runs its own in order, and what is enqueued after
a wait starts after everything that was enqueued before the record. Transfers of one group run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from microddp.errors import PlanError
from microddp.plan.instructions import DATA, Plan, Span, reads, writes
from microddp.plan.stream_form import check_form
from microddp.plan.streams import Group, Launch, Record, StreamName, StreamProgram, Wait

__all__ = ["Collision", "StreamRace", "check_streams", "collisions", "find_sequence_races", "find_stream_races"]

Collision = tuple[int, int, Span]
"""Two instructions, the earlier of the plan first, that touch these same elements, at least one writing."""


@dataclass(frozen=True, slots=True)
class StreamRace:
    """Two pieces of work that a program leaves in no order, or in another order than the plan's.

    Attributes:
        first: an instruction; None: what came before the program, on the caller's stream and on KERNELS.
        second: an instruction; None: what is enqueued on KERNELS after the program.
        span: the elements that both touch; None if either is None.
    """

    first: int | None
    second: int | None
    span: Span | None = None


def find_stream_races(program: StreamProgram, collide: Sequence[Collision] | None = None) -> list[StreamRace]:
    """Every pair that could collide, and all work that may start too early or end too late.

    Args:
        program: a program.
        collide: ``collisions(program.plan)``, if that is known already.

    Raises:
        PlanError: the program is malformed, see ``check_form``.
    """
    check_form(program)
    if not program.operations:
        return []
    played = _Timeline().play(program, 0)
    work = played.work
    races = [StreamRace(None, index) for index in work if not all(work[index].follows(each) for each in played.begin)]
    races += [StreamRace(index, None) for index in work if not played.end.follows(work[index])]
    for first, second, span in collisions(program.plan) if collide is None else collide:
        if not work[second].follows(work[first]):
            races.append(StreamRace(first, second, span))
    return races


def check_streams(program: StreamProgram) -> None:
    """Raises PlanError if the program is malformed or has a race."""
    races = find_stream_races(program)
    if races:
        race, instructions = races[0], program.plan.instructions
        first, second = (
            outside if index is None else f"instruction {index}, {instructions[index]}"
            for index, outside in ((race.first, "what came before it"), (race.second, "what comes after it"))
        )
        raise PlanError(f"rank {program.plan.rank}: {len(races)} races in the stream program; {first} and {second}")


def find_sequence_races(first: StreamProgram, second: StreamProgram) -> list[tuple[int | None, int]]:
    """Pairs of ``first``'s and ``second``'s work that may collide in the staging that they share.

    ``second`` is enqueued right after ``first``, for a caller whose stream is not ordered with that of ``first``. Any
    two buffers other than the tensor are taken to be the same memory. None stands for what is enqueued on KERNELS
    between the two: it may read and write any staging.

    Raises:
        PlanError: a program is malformed.
    """
    for each in (first, second):
        check_form(each)
    timeline = _Timeline()
    played = timeline.play(first, 0), timeline.play(second, 1)
    before: list[tuple[int | None, _Instant, bool]] = [(None, played[0].end, True)]
    before += [(index, played[0].work[index], is_write) for index, is_write in _staging(first.plan).items()]
    after = [(index, played[1].work[index], is_write) for index, is_write in _staging(second.plan).items()]
    return [
        (earlier, later)
        for later, late, writes_late in after
        for earlier, early, writes_early in before
        if (writes_early or writes_late) and not late.follows(early)
    ]


def collisions(plan: Plan) -> list[Collision]:
    """Every two instructions that touch the same elements, at least one writing."""
    found: dict[tuple[int, int], Span] = {}
    accesses = [
        (span.buffer, span.start, span.stop, index, is_write)
        for index, instruction in enumerate(plan.instructions)
        for is_write, touched in ((False, reads(instruction)), (True, writes(instruction)))
        for span in touched
    ]
    accesses.sort()
    for place, (buffer, _, stop, index, is_write) in enumerate(accesses):
        for other in range(place + 1, len(accesses)):
            next_buffer, next_start, next_stop, next_index, next_is_write = accesses[other]
            if next_buffer != buffer or next_start >= stop:
                break
            if next_index != index and (is_write or next_is_write):
                pair = min(index, next_index), max(index, next_index)
                found.setdefault(pair, Span(buffer, next_start, min(stop, next_stop)))
    return [(*pair, span) for pair, span in found.items()]


def _staging(plan: Plan) -> dict[int, bool]:
    """The instructions that touch staging, and whether they write it."""
    found: dict[int, bool] = {}
    for index, instruction in enumerate(plan.instructions):
        for is_write, touched in ((False, reads(instruction)), (True, writes(instruction))):
            if any(span.buffer != DATA for span in touched):
                found[index] = is_write
    return found


_Stream = str
"""Programs in a sequence have the same GROUPS and KERNELS, and each its own CALLER."""


@dataclass(frozen=True, slots=True)
class _Instant:
    """A piece of work: its place on its stream, and how much of each stream is complete before it starts."""

    stream: _Stream
    position: int
    before: dict[_Stream, int]

    def follows(self, other: _Instant) -> bool:
        return self.before.get(other.stream, 0) >= other.position


@dataclass(slots=True)
class _Played:
    """What came before a program, each instruction's work, and what comes after it."""

    begin: list[_Instant]
    work: dict[int, _Instant]
    end: _Instant


@dataclass(slots=True)
class _Timeline:
    """Streams: how much of each stream is complete before what is enqueued next."""

    clocks: dict[_Stream, dict[_Stream, int]] = field(default_factory=dict)

    def play(self, program: StreamProgram, number: int) -> _Played:
        """Enqueues a program, with something on CALLER and on KERNELS before it and on KERNELS after it."""
        caller, groups, kernels = f"caller of {number}", "groups", "kernels"
        names = {StreamName.CALLER: caller, StreamName.GROUPS: groups, StreamName.KERNELS: kernels}
        begin, work = [self._enqueue(caller), self._enqueue(kernels)], {}
        events: dict[int, dict[_Stream, int]] = {}
        for each in program.operations:
            if isinstance(each, Group):
                work.update(dict.fromkeys(each.indices, self._enqueue(groups)))
            elif isinstance(each, Launch):
                work[each.index] = self._enqueue(kernels)
            else:
                clock = self.clocks.setdefault(names[each.stream], {})
                if isinstance(each, Record):
                    events[each.event] = dict(clock)
                elif isinstance(each, Wait):
                    for other, position in events[each.event].items():
                        clock[other] = max(clock.get(other, 0), position)
        return _Played(begin, work, self._enqueue(kernels))

    def _enqueue(self, stream: _Stream) -> _Instant:
        clock = self.clocks.setdefault(stream, {})
        before = dict(clock)
        clock[stream] = before.get(stream, 0) + 1
        return _Instant(stream, clock[stream], before)

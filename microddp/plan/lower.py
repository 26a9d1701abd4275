"""Lowers a schedule to one rank's plan: chunks become spans, staged values get slots, folds get their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from microddp.errors import PlanError
from microddp.plan.dependencies import derive
from microddp.plan.instructions import (
    ARRIVAL,
    DATA,
    WIRE,
    Buffer,
    Combine,
    Copy,
    Instruction,
    Plan,
    Recv,
    RecvCombine,
    Send,
    Span,
)
from microddp.plan.liveness import Liveness
from microddp.plan.own import OwnValues
from microddp.schedule import OWN, Fold, Schedule, Step
from microddp.schedule import Recv as ScheduleRecv
from microddp.schedule import Send as ScheduleSend
from microddp.schedule.chunks import ALIGNMENT_NBYTES, alignment_numel
from microddp.schedule.ir import num_ranks

__all__ = ["LoweringConfig", "lower"]


@dataclass(frozen=True, slots=True)
class LoweringConfig:
    """How to lower.

    Attributes:
        slice_nbytes: bytes of a full slice; a multiple of 16.
        num_slots: slots to alternate between; more are made if the schedule keeps more values staged at once.
        fuse: the transport understands RecvCombine.
        wide: the operator accumulates in a wider type than the data's.
        divides: the operator does something to the complete fold, by world_size (avg divides, others finalize).
        means: partial results travel as means (avg of float16); where the fold is in rank order they do not.
        wire: what travels has another type than the data: a rank's own values go over to a buffer of that type when
            they are first sent or folded, and the results come back from it. In rank order every contribution is
            converted before it is folded, the rank's own too, so that all ranks and algorithms fold the same values.
        alone: the complete fold of a single rank's contribution is finished too.
    """

    slice_nbytes: int
    num_slots: int = 2
    fuse: bool = False
    wide: bool = False
    divides: bool = False
    means: bool = False
    wire: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        if self.slice_nbytes < ALIGNMENT_NBYTES or self.slice_nbytes % ALIGNMENT_NBYTES:
            raise ValueError(f"slice_nbytes must be a positive multiple of {ALIGNMENT_NBYTES}, not {self.slice_nbytes}")
        if self.num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {self.num_slots}")


def lower(schedule: Schedule, rank: int, numel: int, itemsize: int, config: LoweringConfig) -> Plan:
    """The plan of ``rank`` for a tensor of ``numel`` elements of ``itemsize`` bytes.

    Step by step, each step's slices one after the other; or, where the algorithm is ``slice_major``, the whole
    schedule slice by slice. Issues each instruction where its step stands; passes move them later.

    Raises:
        PlanError: the schedule keeps a value staged, or a fold unfinished, across steps without ``slice_major``.
    """
    return _Lowering(schedule, rank, numel, itemsize, config).run()


class _Lowering:
    def __init__(self, schedule: Schedule, rank: int, numel: int, itemsize: int, config: LoweringConfig) -> None:
        self.schedule, self.rank, self.config = schedule, rank, config
        self.numel, self.itemsize = numel, itemsize
        self.steps = list(schedule.steps(rank))
        self.live = Liveness(self.steps)
        self.slice_numel = max(alignment_numel(itemsize), config.slice_nbytes // itemsize)
        self.num_slots = max(config.num_slots, self.live.peak) if self.live.peak else 0
        self.first_slot = WIRE + 1 if config.wire else WIRE
        self.free = deque(range(self.first_slot, self.first_slot + self.num_slots))
        self.slot_of: dict[tuple[int, int], int] = {}
        self.slot_numel = 0
        self.accumulators: list[int] = []  # their sizes
        self.accumulator_of: dict[int, int] = {}  # chunk -> the accumulator that holds its unfinished fold
        self.totals: dict[tuple[int, int], int] = {}  # (step, number of the fold) -> contributions that it covers
        self.accounts = self._account()
        self.out: list[Instruction] = []
        self.own = OwnValues(schedule, rank, self.steps, self.out, wire=config.wire)
        if not schedule.entry.slice_major and self.live.crosses_steps:
            raise PlanError(f"{schedule.algorithm} keeps a staged value across steps: declare it slice_major")

    def run(self) -> Plan:
        num_slices = max((self._num_slices(each) for each in self.steps), default=0)
        if self.schedule.entry.slice_major:
            order = [(step, piece) for piece in range(num_slices) for step in range(len(self.steps))]
        else:
            order = [(step, piece) for step, each in enumerate(self.steps) for piece in range(self._num_slices(each))]
        for step, piece in order:
            self._emit(step, piece)
        self.own.restore()
        if self.config.alone and self.schedule.world_size == 1:
            self._finish_alone()
        buffers = [Buffer("data", self.numel)]
        buffers += [Buffer("wire", self.numel)] * self.config.wire
        buffers += [Buffer(_slot_name(slot), self.slot_numel) for slot in range(self.num_slots)]
        for number, size in enumerate(self.accumulators):
            buffers.append(Buffer(f"acc{number or ''}", size, wide=True))
        where = (self.rank, self.schedule.world_size, self.numel, self.itemsize)
        return Plan(*where, tuple(buffers), tuple(self.out), derive(self.out), self.slice_numel)

    def _emit(self, step: int, piece: int) -> None:
        todo = self.steps[step]
        if not self.slot_of and self.num_slots == self.live.peak:
            self.free = deque(sorted(self.free))  # a schedule that needs every slot starts each slice in slot A
        for keep in todo.keeps:
            data = self._data(keep.chunk, piece)
            if data:
                source = self.own.read(step, piece, keep.chunk, data)
                self.out.append(Copy(step, piece, self._take(keep.chunk, keep.key, data), source))
        fused = self._fusable(step) if self.config.fuse else {}
        self._convert(step, piece, fused)
        for each in todo.transfers:
            data = self._data(each.chunk, piece)
            if isinstance(each, ScheduleSend):
                if data:
                    source = self._source(step, piece, each, data)
                    self.out.append(Send(step, piece, each.peer, source))
                continue
            number = fused.get((each.chunk, each.key))
            if number is not None and data:
                self._receive_combine(step, piece, each, number, data)
            elif data:
                own = each.key == OWN
                out = self.own.write(step, piece, each.chunk, data) if own else self._take(each.chunk, each.key, data)
                self.out.append(Recv(step, piece, each.peer, out))
        self.own.restore()  # what was complete before: while this step's transfers are on their way
        for number, fold in enumerate(todo.folds):
            if number not in fused.values():
                self._combine(step, piece, fold, number)
        self.own.complete(step, piece, self._data)
        self._release(step)

    def _convert(self, step: int, piece: int, fused: Mapping[tuple[int, int], int]) -> None:
        """Converts what the step's transfers need on the wire, before the first of them: a group is not cut in two."""
        in_order = self.schedule.entry.rank_order
        for each in self.steps[step].transfers:
            data = self._data(each.chunk, piece)
            is_sent = isinstance(each, ScheduleSend) and each.key == OWN
            if data and (is_sent or (in_order and (each.chunk, each.key) in fused)):
                self.own.read(step, piece, each.chunk, data, travels=True)

    def _finish_alone(self) -> None:
        for start in range(0, self.numel, self.slice_numel):
            data = Span(DATA, start, min(self.numel, start + self.slice_numel))
            self.out.append(Combine(0, start // self.slice_numel, data, (data,), None, 1))

    def _source(self, step: int, piece: int, each: ScheduleSend, data: Span) -> Span:
        if each.key == OWN:
            return self.own.read(step, piece, each.chunk, data, travels=True)
        return self._staged(each.chunk, each.key, data)

    def _receive_combine(self, step: int, piece: int, each: ScheduleRecv, number: int, data: Span) -> None:
        own = self.own.read(step, piece, each.chunk, data, travels=self.schedule.entry.rank_order)
        operands = tuple(own if key == OWN else ARRIVAL for key in self.steps[step].folds[number].operands)
        out = self.own.write(step, piece, each.chunk, data)
        self.out.append(RecvCombine(step, piece, each.peer, out, operands, *self.accounts[step, number]))

    def _combine(self, step: int, piece: int, fold: Fold, number: int) -> None:
        data = self._data(fold.chunk, piece)
        if not data:
            return
        from_acc, to_acc = self._partial(step, number)
        own = None
        if from_acc:
            own = self._accumulator(fold.chunk, len(data))
        elif OWN in fold.operands:
            own = self.own.read(step, piece, fold.chunk, data, travels=self.schedule.entry.rank_order)
        operands = tuple(own or data if key == OWN else self._staged(fold.chunk, key, data) for key in fold.operands)
        if to_acc:
            out = self._accumulator(fold.chunk, len(data))
        else:
            out = self.own.write(step, piece, fold.chunk, data)
            self.accumulator_of.pop(fold.chunk, None)
        self.out.append(Combine(step, piece, out, operands, *self.accounts[step, number]))

    def _accumulator(self, chunk: int, numel: int) -> Span:
        """The accumulator of the chunk's unfinished fold; the first that no other chunk holds, if it has none yet."""
        taken = self.accumulator_of.values()
        number = self.accumulator_of.get(chunk)
        if number is None:
            number = next(each for each in range(len(taken) + 1) if each not in taken)
            self.accumulator_of[chunk] = number
            self.accumulators += [0] * (number == len(self.accumulators))
        self.accumulators[number] = max(self.accumulators[number], numel)
        return Span(self.first_slot + self.num_slots + number, 0, numel)

    def _partial(self, step: int, number: int) -> tuple[bool, bool]:
        """Whether the fold reads, and leaves, its own chunk in the accumulator: it is rounded only once, at the end."""
        if not (self.config.wide and self.schedule.entry.rank_order):
            return False, False
        from_acc, to_acc = self.live.chain(step, number)
        if to_acc and not self.schedule.entry.slice_major:
            raise PlanError(f"{self.schedule.algorithm} folds one chunk over several steps: declare it slice_major")
        if not to_acc and self.totals[step, number] < self.schedule.world_size:
            text = "uses a fold of some contributions before it is complete, so it cannot round once, in rank order"
            raise PlanError(f"{self.schedule.algorithm}, rank {self.rank}, step {step}: {text}")
        return from_acc, to_acc

    def _account(self) -> dict[tuple[int, int], tuple[tuple[int, ...] | None, int | None]]:
        """(step, number of the fold) -> its weights and its divisor, by adding up what each operand covers."""
        covered: dict[tuple[int, int], int] = {}
        accounts: dict[tuple[int, int], tuple[tuple[int, ...] | None, int | None]] = {}
        means = self.config.means and not self.schedule.entry.rank_order
        for number, step in enumerate(self.steps):
            for keep in step.keeps:
                covered[keep.chunk, keep.key] = covered.get((keep.chunk, OWN), 1)
            for each in step.receives:
                covered[each.chunk, each.key] = num_ranks(each.carries)
            for place, fold in enumerate(step.folds):
                counts = tuple(covered.get((fold.chunk, key), 1) for key in fold.operands)
                total = covered[fold.chunk, OWN] = self.totals[number, place] = sum(counts)
                complete = self.config.divides and not means and total == self.schedule.world_size
                accounts[number, place] = counts if means else None, total if complete else None
        return accounts

    def _fusable(self, step: int) -> dict[tuple[int, int], int]:
        """(chunk, key) of an arrival -> the number of the fold that can happen as it arrives.

        Not what is used again (forwarded), not into a chunk that is sent in the same step (two ranks that do both
        would wait for each other), nor into one that another arrival replaces first.
        """
        todo = self.steps[step]
        busy = {each.chunk for each in todo.transfers if each.key == OWN}
        folded = [fold.chunk for fold in todo.folds]
        found = {}
        for number, fold in enumerate(todo.folds):
            staged = [key for key in fold.operands if key != OWN]
            single = len(fold.operands) == 2 and len(staged) == 1 and folded.count(fold.chunk) == 1
            arrives = single and any(each.chunk == fold.chunk and each.key == staged[0] for each in todo.receives)
            if not arrives or fold.chunk in busy or any(self._partial(step, number)):
                continue
            if self.live.num_uses[fold.chunk, staged[0]] == 1:
                found[fold.chunk, staged[0]] = number
        return found

    def _take(self, chunk: int, key: int, data: Span) -> Span:
        slot = self.slot_of[chunk, key] = self.free.popleft()
        self.slot_numel = max(self.slot_numel, len(data))
        return Span(slot, 0, len(data))

    def _staged(self, chunk: int, key: int, data: Span) -> Span:
        return Span(self.slot_of[chunk, key], 0, len(data))

    def _release(self, step: int) -> None:
        for each in [each for each in self.slot_of if self.live.last_use[each] <= step]:
            self.free.append(self.slot_of.pop(each))

    def _chunk(self, chunk: int) -> tuple[int, int]:
        return self.schedule.chunk_span(chunk, self.numel, self.itemsize)

    def _data(self, chunk: int, piece: int) -> Span | None:
        start, stop = self._chunk(chunk)
        start += piece * self.slice_numel
        return Span(DATA, start, min(stop, start + self.slice_numel)) if start < stop else None

    def _num_slices(self, step: Step) -> int:
        chunks = {each.chunk for each in step.transfers} | {fold.chunk for fold in step.folds}
        lengths = (stop - start for start, stop in map(self._chunk, chunks))
        return max((-(-length // self.slice_numel) for length in lengths), default=0)


def _slot_name(number: int) -> str:
    letters = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        letters = chr(ord("A") + digit) + letters
    return letters

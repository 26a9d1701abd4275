"""Plays a schedule for real, one rank per thread, and takes a picture of every buffer after each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from microddp.plan.instructions import DATA, Combine, Copy, Instruction, Plan, Recv, Send, Span, is_transfer, writes
from microddp.plan.lower import LoweringConfig, lower
from microddp.schedule import Schedule
from microddp.staging import LaneTypes, StagingPool
from microddp.transport.base import Counters, Exchange, Header, Kind, Transfer, Transport
from microddp.transport.thread import run_thread_ranks
from microddp_kernels.launchers import launcher_for
from microddp_kernels.reduce_op import CombineSpec, ReduceOp

__all__ = ["Picture", "Story", "play"]

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One rank after one step.

    Attributes:
        step: its number; -1 is the start.
        moves: what the rank did in it, in words: ``A -> 1`` sends slot A to rank 1.
        sent_from, received_into: names of the buffers that the step's transfers read and filled.
        buffers: by name, a copy of its values, and which of them mean something yet.
    """

    step: int
    moves: tuple[str, ...]
    sent_from: tuple[str, ...]
    received_into: tuple[str, ...]
    buffers: dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class Story:
    """Everything that happened on one rank; ``counters`` are the transport's, ``data`` is what it ends with."""

    rank: int
    plan: Plan
    counters: Counters
    data: torch.Tensor
    pictures: list[Picture] = field(default_factory=list)

    @property
    def staging_names(self) -> list[str]:
        """The names of the staging buffers, in order."""
        return [buffer.name for buffer in self.plan.buffers[1:]]


def play(
    schedule: Schedule,
    rows: Sequence[torch.Tensor],
    op: ReduceOp | None,
    wanted: Callable[[int, int], bool],
) -> list[Story]:
    """Runs ``schedule`` on the thread transport, not hoisted, in one slice.

    Args:
        schedule: what to play.
        rows: what each rank starts with; for all_gather its own chunk, else a whole tensor.
        op: what combines.
        wanted: ``wanted(rank, step)``: whether to keep a picture.

    Returns:
        One story for each rank.
    """
    numel = rows[0].numel() * (schedule.world_size if schedule.collective == "all_gather" else 1)

    def body(transport: Transport) -> Story:
        return _Player(schedule, rows[transport.rank], numel, op, transport).run(wanted)

    return run_thread_ranks(body, schedule.world_size, timeout=_TIMEOUT_S)


class _Player:
    def __init__(
        self, schedule: Schedule, row: torch.Tensor, numel: int, op: ReduceOp | None, transport: Transport
    ) -> None:
        self.schedule, self.op, self.transport = schedule, op, transport
        nbytes = numel * row.dtype.itemsize
        wide = op.accumulation_dtype(row.dtype) if op else row.dtype
        config = LoweringConfig(
            slice_nbytes=max(16, -(-nbytes // 16) * 16),
            wide=wide != row.dtype,
            divides=bool(op and op.divides),
            means=bool(op and op.travels_as_mean(row.dtype)),
        )
        self.plan = lower(schedule, transport.rank, numel, row.dtype.itemsize, config)
        data = torch.zeros(numel, dtype=row.dtype)
        valid = torch.zeros(numel, dtype=torch.bool)
        own = _own_span(schedule, transport.rank, numel, row)
        data[own], valid[own] = row, True
        types = [LaneTypes(row.dtype, row.dtype, wide)]
        self.buffers = [data, *StagingPool().buffers(self.plan, types, data.device)[0]]
        self.valid = [valid, *(torch.zeros(each.numel(), dtype=torch.bool) for each in self.buffers[1:])]
        self.launcher = launcher_for(data.device)
        name = op.name if op else ""
        dtype = str(row.dtype).removeprefix("torch.")
        self.header = Header(
            0, schedule.collective, schedule.algorithm, name, dtype, (numel,), schedule.root, config.slice_nbytes
        )

    def run(self, wanted: Callable[[int, int], bool]) -> Story:
        rank = self.transport.rank
        story = Story(rank, self.plan, self.transport.counters, self.buffers[DATA])
        exchange = self.transport.open(self.header, time.monotonic() + _TIMEOUT_S)
        if wanted(rank, -1):
            story.pictures.append(self._picture(-1, ()))
        for step in range(self.schedule.num_steps(rank)):
            todo = [each for each in self.plan.instructions if each.step == step]
            self._play_step(exchange, todo)
            if wanted(rank, step):
                story.pictures.append(self._picture(step, todo))
        exchange.finish()
        return story

    def _play_step(self, exchange: Exchange, todo: Sequence[Instruction]) -> None:
        """Copies, then all transfers together, then combines: as a step is defined and a plan is lowered.

        Another rank writes here only what this step receives, so that the pictures need no barrier.
        """
        transfers = [self._transfer(each) for each in todo if is_transfer(each)]
        for copy in todo:
            if isinstance(copy, Copy):
                self.launcher.copy(self._view(copy.out), self._view(copy.source))
        if transfers:
            exchange.wait(exchange.post(transfers))
        for fold in todo:
            if isinstance(fold, Combine) and self.op is not None:
                how = CombineSpec(self.op, fold.weights, fold.divisor)
                self.launcher.combine(self._view(fold.out), [self._view(each) for each in fold.operands], how)
        for each in todo:
            for span in writes(each):
                valid = self.valid[span.buffer]
                if span.buffer != DATA:
                    valid[:] = False  # a slot holds what was last written; what is left of older values is no one's
                valid[span.start : span.stop] = True

    def _transfer(self, instruction: Instruction) -> Transfer:
        if isinstance(instruction, Send):
            return Transfer(Kind.SEND, instruction.peer, instruction.step, self._view(instruction.source))
        if isinstance(instruction, Recv):
            return Transfer(Kind.RECV, instruction.peer, instruction.step, self._view(instruction.out))
        raise TypeError(f"a plan lowered without fusing holds {instruction}")

    def _view(self, span: Span) -> torch.Tensor:
        return self.buffers[span.buffer][span.start : span.stop]

    def _picture(self, step: int, todo: Sequence[Instruction]) -> Picture:
        sends = [each.source for each in todo if isinstance(each, Send)]
        receives = [each.out for each in todo if isinstance(each, Recv)]
        names = [buffer.name for buffer in self.plan.buffers]
        held = {name: (self.buffers[i].clone(), self.valid[i].clone()) for i, name in enumerate(names)}
        sources, targets = ({names[span.buffer]: None for span in spans} for spans in (sends, receives))
        return Picture(step, tuple(self._words(each) for each in todo), tuple(sources), tuple(targets), held)

    def _words(self, instruction: Instruction) -> str:
        name = self._name
        if isinstance(instruction, Send):
            return f"{name(instruction.source)} -> {instruction.peer}"
        if isinstance(instruction, Recv):
            return f"{name(instruction.out)} <- {instruction.peer}"
        if isinstance(instruction, Copy):
            return f"{name(instruction.out)} = {name(instruction.source)}"
        if not isinstance(instruction, Combine) or self.op is None:
            raise TypeError(f"a plan lowered without fusing holds {instruction}")
        return f"{name(instruction.out)} = {self._fold_words(instruction, self.op)}"

    def _fold_words(self, fold: Combine, op: ReduceOp) -> str:
        names = [self._name(each) for each in fold.operands]
        if fold.weights is not None:
            sum_text = " + ".join(f"{weight}*{each}" for weight, each in zip(fold.weights, names))
            return f"({sum_text}) / {sum(fold.weights)}"
        sign = OPERATOR_SIGNS.get(op.name)
        text = f" {sign} ".join(names) if sign else f"{op.name}({', '.join(names)})"
        return f"({text}) / {fold.divisor}" if fold.divisor else text

    def _name(self, span: Span) -> str:
        if span.buffer != DATA:
            return self.plan.buffers[span.buffer].name
        if self.schedule.num_chunks == 1:
            return "data"
        spans = (self.schedule.chunk_span(chunk, self.plan.numel, self.plan.itemsize) for chunk in self._chunks())
        return f"c{list(spans).index((span.start, span.stop))}"

    def _chunks(self) -> range:
        return range(self.schedule.num_chunks)


OPERATOR_SIGNS = {"sum": "+", "avg": "+", "prod": "*", "band": "&", "bor": "|", "bxor": "^"}
"""How the operators are written between two operands; the others are written as functions."""


def _own_span(schedule: Schedule, rank: int, numel: int, row: torch.Tensor) -> slice:
    """Where a rank's own values lie at the start: everywhere, or in its chunk of an all_gather."""
    if schedule.collective != "all_gather":
        return slice(0, numel)
    return slice(*schedule.chunk_span(rank, numel, row.dtype.itemsize))

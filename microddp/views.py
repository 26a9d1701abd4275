"""What an engine plays: the views of a plan's spans, the transfers and calls on them, kept while a tensor lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from microddp.plan.instructions import Combine, Copy, Instruction, Plan, Recv, RecvCombine, Send, Span
from microddp.staging import LaneTypes, StagingPool
from microddp.transport.base import Kind, Transfer
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["ProgramCache", "Views"]

_KEPT_PROGRAMS = 16

Actions = TypeVar("Actions")


class Views:
    """The tensors of a plan's spans, each made once: one for each lane; and what is done with them."""

    def __init__(
        self,
        lanes: Sequence[Sequence[torch.Tensor]],
        widths: Sequence[int],
        launcher: Launcher,
        op: ReduceOp | None,
    ) -> None:
        self._lanes = tuple(zip(lanes, widths))
        self._made: dict[Span, tuple[torch.Tensor, ...]] = {}
        self._launcher, self._op = launcher, op
        self.num_lanes = len(lanes)

    def lanes(self, span: Span) -> tuple[torch.Tensor, ...]:
        """What a span is in each lane."""
        found = self._made.get(span)
        if found is None:
            found = self._made[span] = tuple(
                buffers[span.buffer][span.start * width : span.stop * width] for buffers, width in self._lanes
            )
        return found

    def __call__(self, span: Span) -> Values:
        """A span as launchers take it: a tensor, or a tuple of them if there are several lanes."""
        found = self.lanes(span)
        return found if self.num_lanes > 1 else found[0]

    def call(self, instruction: Instruction) -> Callable[[], Any]:
        """What launches a combine or copy."""
        launcher, op = self._launcher, self._op
        if isinstance(instruction, Copy):
            pairs = tuple(zip(self.lanes(instruction.out), self.lanes(instruction.source)))
            return lambda: [launcher.copy(out, source) for out, source in pairs]
        if not isinstance(instruction, Combine) or op is None:
            raise TypeError(f"{instruction} needs an operator" if op is None else f"cannot launch {instruction}")
        out, how = self(instruction.out), _spec(op, instruction.weights, instruction.divisor)
        operands = [self(each) for each in instruction.operands]
        return lambda: launcher.combine(out, operands, how)

    def transfers(self, instruction: Instruction) -> Iterator[Transfer]:
        """A transfer for each lane."""
        if isinstance(instruction, Send):
            for view in self.lanes(instruction.source):
                yield Transfer(Kind.SEND, instruction.peer, instruction.step, view)
        elif isinstance(instruction, Recv):
            for view in self.lanes(instruction.out):
                yield Transfer(Kind.RECV, instruction.peer, instruction.step, view)
        elif isinstance(instruction, RecvCombine) and self._op is not None:
            yield self._receive_combine(instruction, self._op)
        else:
            raise TypeError(f"{instruction} needs an operator" if self._op is None else f"cannot post {instruction}")

    def _receive_combine(self, instruction: RecvCombine, op: ReduceOp) -> Transfer:
        (out,) = self.lanes(instruction.out)  # plans of several lanes are lowered without fusing
        launcher, how = self._launcher, _spec(op, instruction.weights, instruction.divisor)
        held = [None if each is None else self(each) for each in instruction.operands]

        def combine(arrival: torch.Tensor) -> None:
            launcher.combine(out, [arrival if each is None else each for each in held], how)

        return Transfer(Kind.RECV_COMBINE, instruction.peer, instruction.step, out, combine)


@dataclass(slots=True)
class _Program(Generic[Actions]):
    key: tuple[Any, ...]
    plan: Plan
    actions: Actions


class ProgramCache(Generic[Actions]):
    """What ``build`` makes of a plan and tensors: kept while the caller's tensor lives, at the same address.

    Args:
        build: makes the actions of a plan from the views of its spans.
    """

    def __init__(self, launcher: Launcher, pool: StagingPool, build: Callable[[Plan, Views], Actions]) -> None:
        self._launcher, self._pool, self._build = launcher, pool, build
        self._programs: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._programs)

    def kept(self, owner: torch.Tensor) -> dict[int, Any]:
        """The programs kept for a tensor, by the identity of their plan."""
        found: dict[int, Any] = self._programs.get(owner, {})
        return found

    def clear(self) -> None:
        """Forgets all of them."""
        self._programs.clear()

    def find(
        self,
        plan: Plan,
        lanes: tuple[torch.Tensor, ...],
        op: ReduceOp | None,
        types: tuple[LaneTypes, ...] | None,
        owner: torch.Tensor | None,
    ) -> Actions:
        """The actions of ``plan`` on ``lanes``; kept if there is one lane, and an ``owner``."""
        if len(lanes) > 1:
            owner = None  # the views would keep the other lanes alive as long as the first
        data = lanes[0]
        key = (id(plan), data.data_ptr(), data.dtype, id(op), types, self._pool.generation)
        kept: dict[int, _Program[Actions]] = {}
        if owner is not None:
            kept = self._programs.setdefault(owner, kept)
            program = kept.get(id(plan))
            if program is not None and program.key == key:
                return program.actions
        generation = self._pool.generation
        actions = self._build(plan, self.views(plan, lanes, op, types))
        if owner is None:
            return actions
        if generation != self._pool.generation:  # the memory was replaced: let go of every view of the old one
            self._programs.clear()
            kept = self._programs.setdefault(owner, {})
        if len(kept) >= _KEPT_PROGRAMS:
            kept.pop(next(iter(kept)))
        kept[id(plan)] = _Program((*key[:-1], self._pool.generation), plan, actions)
        return actions

    def views(
        self,
        plan: Plan,
        lanes: tuple[torch.Tensor, ...],
        op: ReduceOp | None,
        types: tuple[LaneTypes, ...] | None,
        pool: StagingPool | None = None,
    ) -> Views:
        """Views of ``lanes`` and of the staging of ``pool``, by default the cache's own."""
        types = types or tuple(LaneTypes(each.dtype, each.dtype, _wide(op, each.dtype)) for each in lanes)
        # Detached, since a view keeps the tensor that it was cut from alive, and that may be the owner.
        staging = (pool or self._pool).buffers(plan, types, lanes[0].device)
        buffers = [[lane.detach(), *held] for lane, held in zip(lanes, staging)]
        return Views(buffers, [each.width for each in types], self._launcher, op)


def _wide(op: ReduceOp | None, dtype: torch.dtype) -> torch.dtype:
    return dtype if op is None else op.accumulation_dtype(dtype)


@lru_cache(maxsize=256)
def _spec(op: ReduceOp, weights: tuple[int, ...] | None, divisor: int | None) -> CombineSpec:
    return CombineSpec(op, weights, divisor)

"""Plays a plan on a launcher and a transport. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from microddp.plan.instructions import Combine, Copy, Instruction, Plan, Recv, RecvCombine, Send, Span
from microddp.plan.issue import Issue, host_issues
from microddp.staging import LaneTypes, StagingPool
from microddp.transport.base import Exchange, Header, Kind, Transfer, Transport
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["Engine"]

_KEPT_PROGRAMS = 16


@dataclass(slots=True)
class _Action:
    """An issue with its views made: transfers to post, or a call to make."""

    waits: tuple[int, ...]
    indices: tuple[int, ...]
    transfers: tuple[Transfer, ...] | None
    call: Callable[..., Any]


@dataclass(slots=True)
class _Program:
    key: tuple[Any, ...]
    plan: Plan
    actions: list[_Action]


class _Views:
    """The tensors of a plan's spans, each made once: one for each lane."""

    def __init__(self, lanes: Sequence[Sequence[torch.Tensor]], widths: Sequence[int]) -> None:
        self._lanes = tuple(zip(lanes, widths))
        self._made: dict[Span, tuple[torch.Tensor, ...]] = {}
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


class Engine:
    """Runs the plans of one rank.

    The views that a plan needs are made once for a tensor and kept while that tensor lives, at the same address.
    """

    def __init__(self, transport: Transport, launcher: Launcher, pool: StagingPool) -> None:
        self.transport, self.launcher, self.pool = transport, launcher, pool
        self._programs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._issues: dict[int, tuple[Plan, tuple[Issue, ...]]] = {}

    def run(
        self,
        plan: Plan,
        data: Values,
        op: ReduceOp | None,
        header: Header,
        deadline: float,
        *,
        types: tuple[LaneTypes, ...] | None = None,
        owner: torch.Tensor | None = None,
    ) -> None:
        """Does one collective: ``data`` (1-D, contiguous, ``plan.numel`` elements) becomes the result.

        Args:
            plan: this rank's plan.
            data: the tensor, worked on in place; of several lanes, all of them. Each lane is a message of its own.
            op: what combines; None for a collective that combines nothing.
            header: what the ranks must agree on.
            deadline: in ``time.monotonic()`` seconds.
            types: of each lane; None: the data's own type travels, and widths are 1.
            owner: the tensor with whose life the views of ``data`` are kept; None keeps none.

        Raises:
            TransportError: a peer failed, refused, or did not come; ``data`` is then undefined.
        """
        exchange = self.transport.open(header, deadline)
        try:
            lanes = data if isinstance(data, tuple) else (data,)
            actions = self._actions(plan, lanes, op, types, owner)
            num_events = len(plan.instructions) * len(lanes)
            exchange.run(lambda: _play_on_host(exchange, actions, num_events))
        except BaseException as error:
            self.transport.abort(error)
            raise

    def clear(self) -> None:
        """Forgets all views."""
        self._programs.clear()
        self._issues.clear()

    def _actions(
        self,
        plan: Plan,
        lanes: tuple[torch.Tensor, ...],
        op: ReduceOp | None,
        types: tuple[LaneTypes, ...] | None,
        owner: torch.Tensor | None,
    ) -> list[_Action]:
        data = lanes[0]
        if len(lanes) > 1:
            owner = None  # the views would keep the other lanes alive as long as the first
        key = (id(plan), data.data_ptr(), data.dtype, id(op), types, self.pool.generation)
        kept: dict[int, _Program] = {}
        if owner is not None:
            kept = self._programs.setdefault(owner, kept)
            program = kept.get(id(plan))
            if program is not None and program.key == key:
                return program.actions
        types = types or tuple(LaneTypes(each.dtype, each.dtype, _wide(op, each.dtype)) for each in lanes)
        generation = self.pool.generation
        # Detached, since a view keeps the tensor that it was cut from alive, and that may be the owner.
        staging = self.pool.buffers(plan, types, data.device)
        buffers = [[lane.detach(), *held] for lane, held in zip(lanes, staging)]
        views = _Views(buffers, [each.width for each in types])
        actions = [self._action(plan, issue, views, op) for issue in self._issues_of(plan)]
        if owner is None:
            return actions
        if generation != self.pool.generation:  # the memory was replaced: let go of every view of the old one
            self._programs.clear()
            kept = self._programs.setdefault(owner, {})
        if len(kept) >= _KEPT_PROGRAMS:
            kept.pop(next(iter(kept)))
        kept[id(plan)] = _Program((*key[:-1], self.pool.generation), plan, actions)
        return actions

    def _issues_of(self, plan: Plan) -> tuple[Issue, ...]:
        found = self._issues.get(id(plan))
        if found is None or found[0] is not plan:
            if len(self._issues) >= 4 * _KEPT_PROGRAMS:
                self._issues.pop(next(iter(self._issues)))
            found = self._issues[id(plan)] = plan, host_issues(plan)
        return found[1]

    def _action(self, plan: Plan, issue: Issue, views: _Views, op: ReduceOp | None) -> _Action:
        """Each instruction has ``num_lanes`` events: a transfer one for each lane, a call one, the first."""
        count = views.num_lanes
        waits = tuple(each * count + lane for each in issue.waits for lane in range(count))
        if issue.is_post:
            indices = tuple(each * count + lane for each in issue.indices for lane in range(count))
            instructions = (plan.instructions[each] for each in issue.indices)
            transfers = tuple(each for one in instructions for each in self._transfers(one, views, op))
            return _Action(waits, indices, transfers, _nothing)
        call = self._call(plan.instructions[issue.indices[0]], views, op)
        return _Action(waits, (issue.indices[0] * count,), None, call)

    def _call(self, instruction: Instruction, views: _Views, op: ReduceOp | None) -> Callable[..., Any]:
        launcher = self.launcher
        if isinstance(instruction, Copy):
            pairs = tuple(zip(views.lanes(instruction.out), views.lanes(instruction.source)))
            return lambda: [launcher.copy(out, source) for out, source in pairs]
        if not isinstance(instruction, Combine) or op is None:
            raise TypeError(f"{instruction} needs an operator" if op is None else f"cannot launch {instruction}")
        out, how = views(instruction.out), _spec(op, instruction.weights, instruction.divisor)
        operands = [views(each) for each in instruction.operands]
        return lambda: launcher.combine(out, operands, how)

    def _transfers(self, instruction: Instruction, views: _Views, op: ReduceOp | None) -> Iterator[Transfer]:
        if isinstance(instruction, Send):
            for view in views.lanes(instruction.source):
                yield Transfer(Kind.SEND, instruction.peer, instruction.step, view)
        elif isinstance(instruction, Recv):
            for view in views.lanes(instruction.out):
                yield Transfer(Kind.RECV, instruction.peer, instruction.step, view)
        elif isinstance(instruction, RecvCombine) and op is not None:
            yield self._receive_combine(instruction, views, op)
        else:
            raise TypeError(f"{instruction} needs an operator" if op is None else f"cannot post {instruction}")

    def _receive_combine(self, instruction: RecvCombine, views: _Views, op: ReduceOp) -> Transfer:
        (out,) = views.lanes(instruction.out)  # plans of several lanes are lowered without fusing
        launcher, how = self.launcher, _spec(op, instruction.weights, instruction.divisor)
        held = [None if each is None else views(each) for each in instruction.operands]

        def combine(arrival: torch.Tensor) -> None:
            launcher.combine(out, [arrival if each is None else each for each in held], how)

        return Transfer(Kind.RECV_COMBINE, instruction.peer, instruction.step, out, combine)


def _play_on_host(exchange: Exchange, actions: Sequence[_Action], num_instructions: int) -> None:
    events: list[Any] = [None] * num_instructions
    for action in actions:
        if action.waits:
            exchange.wait([events[each] for each in action.waits])
        if action.transfers is None:
            action.call()
        else:
            for index, event in zip(action.indices, exchange.post(action.transfers)):
                events[index] = event
    exchange.finish()


def _wide(op: ReduceOp | None, dtype: torch.dtype) -> torch.dtype:
    return dtype if op is None else op.accumulation_dtype(dtype)


@lru_cache(maxsize=256)
def _spec(op: ReduceOp, weights: tuple[int, ...] | None, divisor: int | None) -> CombineSpec:
    return CombineSpec(op, weights, divisor)


def _nothing() -> None:
    return None

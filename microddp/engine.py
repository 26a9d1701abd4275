"""Plays a plan on a launcher and a transport. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from microddp.plan.instructions import Combine, Copy, Instruction, Plan, Recv, RecvCombine, Send, Span
from microddp.plan.issue import Issue, host_issues, stream_issues
from microddp.staging import StagingPool
from microddp.transport.base import Exchange, Header, Kind, Transfer, Transport
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.reduce_op import CombineSpec, ReduceOp

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
    """The tensors of a plan's spans, each made once."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._made: dict[Span, torch.Tensor] = {}

    def __call__(self, span: Span) -> torch.Tensor:
        view = self._made.get(span)
        if view is None:
            view = self._made[span] = self._buffers[span.buffer][span.start : span.stop]
        return view


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
        data: torch.Tensor,
        op: ReduceOp | None,
        header: Header,
        deadline: float,
        *,
        owner: torch.Tensor | None = None,
        queue: Any = None,
    ) -> None:
        """Does one collective: ``data`` (1-D, contiguous, ``plan.numel`` elements) becomes the result.

        Args:
            plan: this rank's plan.
            data: the tensor, worked on in place.
            op: what combines; None for a collective that combines nothing.
            header: what the ranks must agree on.
            deadline: in ``time.monotonic()`` seconds.
            owner: the tensor with whose life the views of ``data`` are kept; None keeps none.
            queue: the device stream of a stream-ordered transport.

        Raises:
            TransportError: a peer failed, refused, or did not come; ``data`` is then undefined.
        """
        exchange = self.transport.open(header, deadline)
        try:
            actions = self._actions(plan, data, op, owner)
            if self.transport.stream_ordered:
                _play_on_stream(exchange, actions, len(plan.instructions), queue)
                exchange.finish()
            else:
                exchange.run(lambda: _play_on_host(exchange, actions, len(plan.instructions)))
        except BaseException as error:
            self.transport.abort(error)
            raise

    def clear(self) -> None:
        """Forgets all views."""
        self._programs.clear()
        self._issues.clear()

    def _actions(
        self, plan: Plan, data: torch.Tensor, op: ReduceOp | None, owner: torch.Tensor | None
    ) -> list[_Action]:
        key = (id(plan), data.data_ptr(), data.dtype, id(op), self.pool.generation)
        kept: dict[int, _Program] = {}
        if owner is not None:
            kept = self._programs.setdefault(owner, kept)
            program = kept.get(id(plan))
            if program is not None and program.key == key:
                return program.actions
        wide = op.accumulation_dtype(data.dtype) if op else data.dtype
        generation = self.pool.generation
        # Detached, since a view keeps the tensor that it was cut from alive, and that may be the owner.
        views = _Views([data.detach(), *self.pool.buffers(plan, data.dtype, wide, data.device)])
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
            cut = stream_issues if self.transport.stream_ordered else host_issues
            if len(self._issues) >= 4 * _KEPT_PROGRAMS:
                self._issues.pop(next(iter(self._issues)))
            found = self._issues[id(plan)] = plan, cut(plan)
        return found[1]

    def _action(self, plan: Plan, issue: Issue, views: _Views, op: ReduceOp | None) -> _Action:
        if issue.is_post:
            transfers = tuple(self._transfer(plan.instructions[each], views, op) for each in issue.indices)
            return _Action(issue.waits, issue.indices, transfers, _nothing)
        return _Action(issue.waits, issue.indices, None, self._call(plan.instructions[issue.indices[0]], views, op))

    def _call(self, instruction: Instruction, views: _Views, op: ReduceOp | None) -> Callable[..., Any]:
        launcher = self.launcher
        if isinstance(instruction, Copy):
            out, source = views(instruction.out), views(instruction.source)
            return lambda queue=None: launcher.copy(out, source, queue)
        if not isinstance(instruction, Combine) or op is None:
            raise TypeError(f"{instruction} needs an operator" if op is None else f"cannot launch {instruction}")
        out, how = views(instruction.out), _spec(op, instruction.weights, instruction.divisor)
        operands = [views(each) for each in instruction.operands]
        return lambda queue=None: launcher.combine(out, operands, how, queue)

    def _transfer(self, instruction: Instruction, views: _Views, op: ReduceOp | None) -> Transfer:
        if isinstance(instruction, Send):
            return Transfer(Kind.SEND, instruction.peer, instruction.step, views(instruction.source))
        if isinstance(instruction, Recv):
            return Transfer(Kind.RECV, instruction.peer, instruction.step, views(instruction.out))
        if not isinstance(instruction, RecvCombine) or op is None:
            raise TypeError(f"{instruction} needs an operator" if op is None else f"cannot post {instruction}")
        launcher, out = self.launcher, views(instruction.out)
        how = _spec(op, instruction.weights, instruction.divisor)
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


def _play_on_stream(exchange: Exchange, actions: Sequence[_Action], num_instructions: int, queue: Any) -> None:
    events: list[Any] = [None] * num_instructions
    for action in actions:
        after = [events[each] for each in action.waits if events[each] is not None]
        if action.transfers is None:
            exchange.wait(after, queue)
            events[action.indices[0]] = action.call(queue)
        else:
            for index, event in zip(action.indices, exchange.post(action.transfers, after)):
                events[index] = event


@lru_cache(maxsize=256)
def _spec(op: ReduceOp, weights: tuple[int, ...] | None, divisor: int | None) -> CombineSpec:
    return CombineSpec(op, weights, divisor)


def _nothing(queue: Any = None) -> None:
    return None

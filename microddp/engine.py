"""Plays a plan on a launcher and a transport whose events the host waits for. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from microddp import tracing
from microddp.plan.instructions import Plan
from microddp.plan.issue import Issue, host_issues
from microddp.staging import LaneTypes, StagingPool
from microddp.tracing_host import play_traced
from microddp.transport.base import Exchange, Header, Transfer, Transport
from microddp.views import ProgramCache, Views
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.reduce_op import ReduceOp, Values

__all__ = ["Engine"]

_KEPT_ISSUES = 64


@dataclass(slots=True)
class _Action:
    """An issue with its views made: transfers to post, or a call to make."""

    waits: tuple[int, ...]
    indices: tuple[int, ...]
    transfers: tuple[Transfer, ...] | None
    call: Callable[..., Any]


class Engine:
    """Runs the plans of one rank.

    The views that a plan needs are made once for a tensor and kept while that tensor lives, at the same address.
    """

    def __init__(self, transport: Transport, launcher: Launcher, pool: StagingPool) -> None:
        self.transport, self.launcher, self.pool = transport, launcher, pool
        self.programs: ProgramCache[list[_Action]] = ProgramCache(launcher, pool, self._actions)
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
        tracer = tracing.current()
        if tracer is None:
            self._run(plan, data, op, header, deadline, types, owner, _play)
            return
        with tracer.collective(plan, header, op, types) as trace:
            self._run(plan, data, op, header, deadline, types, owner, partial(play_traced, trace))

    def clear(self) -> None:
        """Forgets all views."""
        self.programs.clear()
        self._issues.clear()

    def _run(
        self,
        plan: Plan,
        data: Values,
        op: ReduceOp | None,
        header: Header,
        deadline: float,
        types: tuple[LaneTypes, ...] | None,
        owner: torch.Tensor | None,
        play: Callable[[Exchange, Sequence[_Action], int, int], None],
    ) -> None:
        exchange = self.transport.open(header, deadline)
        try:
            lanes = data if isinstance(data, tuple) else (data,)
            actions = self.programs.find(plan, lanes, op, types, owner)
            num_events = len(plan.instructions) * len(lanes)
            exchange.run(lambda: play(exchange, actions, num_events, len(lanes)))
        except BaseException as error:
            self.transport.abort(error)
            raise

    def _actions(self, plan: Plan, views: Views) -> list[_Action]:
        return [_action(plan, issue, views) for issue in self._issues_of(plan)]

    def _issues_of(self, plan: Plan) -> tuple[Issue, ...]:
        found = self._issues.get(id(plan))
        if found is None or found[0] is not plan:
            if len(self._issues) >= _KEPT_ISSUES:
                self._issues.pop(next(iter(self._issues)))
            found = self._issues[id(plan)] = plan, host_issues(plan)
        return found[1]


def _action(plan: Plan, issue: Issue, views: Views) -> _Action:
    """Each instruction has ``num_lanes`` events: a transfer one for each lane, a call one, the first."""
    count = views.num_lanes
    waits = tuple(each * count + lane for each in issue.waits for lane in range(count))
    if issue.is_post:
        indices = tuple(each * count + lane for each in issue.indices for lane in range(count))
        instructions = (plan.instructions[each] for each in issue.indices)
        transfers = tuple(each for one in instructions for each in views.transfers(one))
        return _Action(waits, indices, transfers, _nothing)
    call = views.call(plan.instructions[issue.indices[0]])
    return _Action(waits, (issue.indices[0] * count,), None, call)


def _play(exchange: Exchange, actions: Sequence[_Action], num_events: int, num_lanes: int) -> None:
    events: list[Any] = [None] * num_events
    for action in actions:
        if action.waits:
            exchange.wait([events[each] for each in action.waits])
        if action.transfers is None:
            action.call()
        else:
            for index, event in zip(action.indices, exchange.post(action.transfers)):
                events[index] = event
    exchange.finish()


def _nothing() -> None:
    return None

"""Plays the actions of the host engine with a range around each, and notes when each group was in flight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from microddp.tracing import FUSED, TRANSFERS, Trace
from microddp.tracing_sinks import Message
from microddp.transport.base import Exchange, Kind, Transfer

__all__ = ["HostAction", "play_traced"]


class HostAction(Protocol):
    """What the host engine plays: events to wait for, then transfers to post, or a call to make."""

    @property
    def waits(self) -> tuple[int, ...]: ...
    @property
    def indices(self) -> tuple[int, ...]: ...
    @property
    def transfers(self) -> tuple[Transfer, ...] | None: ...
    @property
    def call(self) -> Callable[..., Any]: ...


def play_traced(
    trace: Trace, exchange: Exchange, actions: Sequence[HostAction], num_events: int, num_lanes: int
) -> None:
    """What the engine does without ``trace``, in the same order; instruction i has the events from i·num_lanes on."""
    events: list[Any] = [None] * num_events
    flights = _Flights(trace)
    for action in actions:
        if action.waits:
            with trace.wait(_instructions(action.waits, num_lanes)):
                exchange.wait([events[each] for each in action.waits])
            flights.land(action.waits)
        instructions = _instructions(action.indices, num_lanes)
        if action.transfers is None:
            with trace.kernel(instructions[0]):
                action.call()
            continue
        pairs = zip(action.indices, action.transfers)
        transfers = [_traced(trace, each, index // num_lanes) for index, each in pairs]
        flights.start(action.indices, transfers, num_lanes)
        with trace.group(instructions, track=None):  # in recorders it lasts until it lands
            posted = exchange.post(transfers)
        for index, event in zip(action.indices, posted):
            events[index] = event
    with trace.range("wait for the rest"):
        exchange.finish()
    flights.land(range(num_events))


def _instructions(events: Iterable[int], num_lanes: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(each // num_lanes for each in events))


def _traced(trace: Trace, transfer: Transfer, index: int) -> Transfer:
    """The transfer with a range around its combine, which runs on whichever thread moves the data."""
    combine = transfer.combine
    if combine is None:
        return transfer

    def combine_traced(arrival: torch.Tensor) -> None:
        with trace.kernel(index, track=FUSED):
            combine(arrival)

    return replace(transfer, combine=combine_traced)


@dataclass(slots=True)
class _Flight:
    name: str
    start_ns: int
    awaited: set[int]  # events
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class _Flights:
    """The transfers that were posted and are not known to be complete, by step and slice.

    A flight lands when the host has seen all its receives complete, or, if it has none, its sends: the engine waits for
    most sends at the very end only. A host learns of it when it waits: what is told here is no less than the truth.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._flights: list[_Flight] = []
        self._numbers: Counter[tuple[int, int]] = Counter()

    def start(self, indices: Sequence[int], transfers: Sequence[Transfer], num_lanes: int) -> None:
        """Just before transfers are posted: those of one step and slice are one flight."""
        if not self._trace.records:
            return
        instructions = self._trace.names.plan.instructions
        portions: dict[tuple[int, int], list[tuple[int, Transfer]]] = {}
        for index, each in zip(indices, transfers):
            found = instructions[index // num_lanes]
            portions.setdefault((found.step, found.slice), []).append((index, each))
        now = time.perf_counter_ns()
        self._flights += [self._flight(each, num_lanes, now) for each in portions.values()]

    def land(self, indices: Iterable[int]) -> None:
        """These events are complete."""
        now, done = time.perf_counter_ns(), set(indices)
        for each in self._flights:
            each.awaited -= done
            if not each.awaited:
                self._trace.keep(TRANSFERS, each.name, each.start_ns, now, each.sends, each.receives)
        self._flights = [each for each in self._flights if each.awaited]

    def _flight(self, portion: Sequence[tuple[int, Transfer]], num_lanes: int, now: int) -> _Flight:
        messages: dict[bool, list[Message]] = {True: [], False: []}
        events: dict[bool, set[int]] = {True: set(), False: set()}
        for index, each in portion:
            is_send = each.kind is Kind.SEND
            messages[is_send].append(self._message(each.peer, is_send))
            events[is_send].add(index)
        name = self._trace.names.group(_instructions((index for index, _ in portion), num_lanes))
        return _Flight(name, now, events[False] or events[True], tuple(messages[True]), tuple(messages[False]))

    def _message(self, peer: int, is_send: bool) -> Message:
        """Messages between two ranks match in posting order, so that both ends number them alike."""
        edge = (self._trace.rank, peer) if is_send else (peer, self._trace.rank)
        self._numbers[edge] += 1
        return self._trace.header.sequence, *edge, self._numbers[edge] - 1

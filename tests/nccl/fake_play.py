"""Plays what was enqueued on the streams of a ``FakeWorld``, of all ranks, in one random legal interleaving.

* A stream runs its operations in order. A wait ends once its event's record was reached.
* The groups of a rank start in the order in which they were enqueued, each when the one before it is complete.
* The k-th send from a to b meets the k-th receive at b from a. Once the groups of both ends have started, the bytes
  move at any moment, those of each transfer for themselves; a group is complete when all its transfers are.

Only what touches memory, kernels and moves, is put into random order. Records, waits and starts happen as soon as they
can: that takes no order away from what they set free.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from typing import Any

import torch

from microddp.transport.base import Kind, Transfer
from tests.nccl.fake_device import FakeGroup, FakeKernel, FakeRecord, FakeStream, FakeWait, FakeWorld

__all__ = ["FakeDeadlockError", "Player", "Strategy", "adversarial", "one_sided", "ranked", "shuffled"]

_KERNEL, _GROUP, _RECORD, _WAIT = range(4)
_ALWAYS = 0  # the token of what was reached before anything is played

Strategy = Callable[[random.Random, int], tuple[list[float], float]]
"""Given the number of actors (streams, then edges): when each wants its turn, lowest first; how much chance adds."""


def shuffled(chance: random.Random, num_actors: int) -> tuple[list[float], float]:
    """Every kernel and every move has a random place in the order."""
    return [0.0] * num_actors, 1.0


def ranked(chance: random.Random, num_actors: int) -> tuple[list[float], float]:
    """Streams and edges have random priorities: whoever is first goes on until it has to wait."""
    return [chance.random() for _ in range(num_actors)], 0.0


def one_sided(chance: random.Random, num_actors: int) -> tuple[list[float], float]:
    """One stream or edge always goes last, or first, as far as it can; the others are shuffled."""
    turns = [0.0] * num_actors
    turns[chance.randrange(num_actors)] = chance.choice((-2.0, 2.0))
    return turns, 1.0


class FakeDeadlockError(Exception):
    """Nothing may go on. The text says what each stream waits for."""


class Player:
    """The streams of a world as they are now, made ready to be played again and again.

    Raises:
        ValueError: the two ends of a transfer differ in size.
    """

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self._place_of: dict[FakeWait, tuple[int, int]] = {}
        self._records: dict[FakeRecord, int] = {}
        self._group_of: list[FakeGroup] = []
        self._stream_of: list[int] = []  # of each group
        self._turn_of: list[int] = []  # of each group among those of its rank
        self._unmet: list[tuple[int, Transfer]] = []
        self._code = [self._compiled(number, stream) for number, stream in enumerate(world.streams)]
        self._number_turns()
        self._pairs_of: list[list[int]] = [[] for _ in self._group_of]
        self._moves: list[tuple[Any, Any, int, int, int]] = []  # (out, source, group, group, actor)
        self.edges: dict[tuple[int, int], int] = {}
        self._match()
        self.num_actors = len(world.streams) + len(self.edges)

    def without(self, waits: Collection[FakeWait]) -> Player:
        """The same, but for waits that are left out."""
        player = copy.copy(self)
        player._code = [list(each) for each in self._code]
        for each in waits:
            stream, place = self._place_of[each]
            player._code[stream][place] = _WAIT, _ALWAYS
        return player

    def actors(self, stream: FakeStream) -> list[int]:
        """The actors that do the work of a stream: itself and, if it has groups, the edges of its rank."""
        own = self.world.streams.index(stream)
        if not any(isinstance(each, FakeGroup) for each in stream.operations):
            return [own]
        return [own, *(actor for edge, actor in self.edges.items() if stream.rank in edge)]

    def play(self, seed: int, strategy: Strategy = shuffled) -> None:
        """Runs everything once.

        Raises:
            FakeDeadlockError: nothing may go on.
        """
        chance = random.Random(seed)
        turns, spread = strategy(chance, self.num_actors)
        _Run(self, chance.random, turns, spread).run()
        self.world.played = set(self._records)

    def _compiled(self, number: int, stream: FakeStream) -> list[tuple[int, Any]]:
        code: list[tuple[int, Any]] = []
        for each in stream.operations:
            if isinstance(each, FakeKernel):
                code.append((_KERNEL, each.call))
            elif isinstance(each, FakeRecord):
                code.append((_RECORD, self._token(each)))
            elif isinstance(each, FakeGroup):
                code.append((_GROUP, len(self._group_of)))
                self._group_of.append(each)
                self._stream_of.append(number)
            else:
                self._place_of[each] = number, len(code)
                code.append((_WAIT, _ALWAYS if each.record is None else self._token(each.record)))
        return code

    def _token(self, record: FakeRecord) -> int:
        return self._records.setdefault(record, len(self._records) + 1)

    def _number_turns(self) -> None:
        """Groups of a rank take turns as they were enqueued, whatever their streams."""
        ranks = [self.world.streams[each].rank for each in self._stream_of]
        order = sorted(range(len(ranks)), key=lambda group: self._group_of[group].number)
        counts: dict[int, int] = defaultdict(int)
        self._turn_of = [0] * len(ranks)
        for group in order:
            self._turn_of[group] = counts[ranks[group]]
            counts[ranks[group]] += 1

    def _match(self) -> None:
        """Pairs the k-th send of each edge with its k-th receive."""
        ends: dict[tuple[int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        for group in sorted(range(len(self._group_of)), key=self._turn_of.__getitem__):
            rank = self.world.streams[self._stream_of[group]].rank
            for each in self._group_of[group].transfers:
                is_recv = each.kind is not Kind.SEND
                ends[(each.peer, rank) if is_recv else (rank, each.peer)][is_recv].append((group, each))
        for edge, (sends, recvs) in ends.items():
            actor = self.edges.setdefault(edge, len(self.world.streams) + len(self.edges))
            for (sender, send), (receiver, recv) in zip(sends, recvs):
                if send.nbytes != recv.nbytes:
                    raise ValueError(f"rank {edge[0]} sends {send.nbytes} bytes, rank {edge[1]} takes {recv.nbytes}")
                for group in (sender, receiver):
                    self._pairs_of[group].append(len(self._moves))
                self._moves.append((_memory(recv.view), _memory(send.view), sender, receiver, actor))
            common = min(len(sends), len(recvs))
            self._unmet += [*sends[common:], *recvs[common:]]
        for group, _ in self._unmet:
            self._pairs_of[group].append(-1)


def adversarial(player: Player, first: FakeStream, last: FakeStream) -> Strategy:
    """Makes ``first`` and its transfers run as early, and ``last`` and its as late, as they can."""
    early, late = player.actors(first), player.actors(last)

    def strategy(chance: random.Random, num_actors: int) -> tuple[list[float], float]:
        turns = [chance.choice((0.0, 0.0, 1.0)) for _ in range(num_actors)]
        for actor in late:
            turns[actor] = 4.0
        for actor in early:
            turns[actor] = -4.0
        return turns, 1.0

    return strategy


class _Run:
    """One play: what is done so far."""

    def __init__(self, player: Player, chance: Callable[[], float], turns: list[float], spread: float) -> None:
        self.player, self.chance, self.turns, self.spread = player, chance, turns, spread
        streams = player.world.streams
        self.at = [0] * len(streams)
        self.done = bytearray(len(player._records) + 1)
        self.done[_ALWAYS] = 1
        self.waiting: dict[int, list[int]] = {}  # token -> streams
        self.started = bytearray(len(player._moves))
        self.left = [len(each) for each in player._pairs_of]
        self.turn = [0] * player.world.world_size
        self.queued: dict[tuple[int, int], int] = {}  # (rank, turn) -> stream whose group waits for its turn
        self.ready: list[tuple[float, int]] = []

    def run(self) -> None:
        player, ready, at, left = self.player, self.ready, self.at, self.left
        code, moves, stream_of, num_streams = player._code, player._moves, player._stream_of, len(player._code)
        self._advance(range(num_streams))
        while ready:
            _, actor = heappop(ready)
            if actor < num_streams:
                code[actor][at[actor]][1]()
                at[actor] += 1
                self._advance((actor,))
                continue
            out, source, *groups, _ = moves[actor - num_streams]
            out[:] = source
            for group in groups:
                left[group] -= 1
                if not left[group]:
                    self._advance(self._end(group, stream_of[group]))
        if any(at[number] < len(code[number]) for number in range(num_streams)):
            raise FakeDeadlockError("; ".join(self._blocked()))

    def _advance(self, streams: Iterable[int]) -> None:
        """Lets streams pass what is not work, until they come to a kernel or have to wait."""
        code, at, done = self.player._code, self.at, self.done
        todo = list(streams)
        while todo:
            number = todo.pop()
            operations, place = code[number], at[number]
            while place < len(operations):
                kind, what = operations[place]
                if kind == _RECORD:
                    done[what] = 1
                    todo += self.waiting.pop(what, ())
                elif kind == _KERNEL:
                    heappush(self.ready, (self.turns[number] + self.spread * self.chance(), number))
                    break
                elif kind == _GROUP:
                    self._start(number, what)
                    break
                elif not done[what]:
                    self.waiting.setdefault(what, []).append(number)
                    break
                place += 1
            at[number] = place

    def _start(self, number: int, group: int) -> None:
        """Starts a group if it is its turn."""
        player = self.player
        rank, turn = player.world.streams[number].rank, player._turn_of[group]
        if turn != self.turn[rank]:
            self.queued[rank, turn] = number
            return
        for move in player._pairs_of[group]:
            if move >= 0:
                self.started[move] += 1
                if self.started[move] == 2:
                    when = self.turns[player._moves[move][4]] + self.spread * self.chance()
                    heappush(self.ready, (when, len(player._code) + move))

    def _end(self, group: int, number: int) -> list[int]:
        """Ends a group; returns the streams that may go on."""
        rank = self.player.world.streams[number].rank
        self.at[number] += 1
        self.turn[rank] += 1
        queued = self.queued.pop((rank, self.turn[rank]), None)
        return [number] if queued is None else [number, queued]

    def _blocked(self) -> Iterable[str]:
        player = self.player
        streams, code = player.world.streams, player._code
        record_of = {token: record for record, token in player._records.items()}
        for number, stream in enumerate(streams):
            if self.at[number] == len(code[number]):
                continue
            kind, what = code[number][self.at[number]]
            where = f"{stream}, operation {self.at[number]},"
            if kind == _WAIT:
                yield f"{where} waits for an event of {record_of[what].stream}"
            elif player._turn_of[what] != self.turn[stream.rank]:
                yield f"{where} waits for an earlier group of its rank"
            else:
                yield f"{where} waits for {', '.join(self._missing(what)) or 'nothing'}"

    def _missing(self, group: int) -> Iterable[str]:
        """The transfers of a group that have not met their other end."""
        player = self.player
        for move in player._pairs_of[group]:
            if move >= 0 and self.started[move] < 2:
                _, _, sender, receiver, _ = player._moves[move]
                is_send = sender == group
                other = receiver if is_send else sender
                peer = player.world.streams[player._stream_of[other]].rank
                what = "send to" if is_send else "receive from"
                yield f"its {what} rank {peer} (whose group {player._turn_of[other]})"
        for unmet, each in player._unmet:
            if unmet == group:
                yield f"its {each.kind.value} with rank {each.peer}, which never posts the other end"


def _memory(view: torch.Tensor) -> memoryview:
    return view.detach().view(torch.uint8).numpy().data

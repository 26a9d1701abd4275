"""Random programs for the model, and what really becomes of them: on the stand-in, by CuPy's own calls, in threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tests.nccl.model_calls import Call, GroupEnd, GroupStart, Recv, Send

__all__ = ["Expected", "Outcome", "play", "random_programs"]

Program = list[Call]
Portion = list[Send | Recv]

PATIENCE_S: Final = 10.0
BLOCKED_S: Final = 0.02  # what has not moved by then is taken to be blocked
MAX_NBYTES: Final = 4


def random_programs(seed: int) -> list[Program]:
    """Calls of two to four ranks that mostly fit, cut into groups at random, with up to two things done to them."""
    chance = random.Random(seed)
    world_size = chance.randint(2, 4)
    sizes = chance.choice(((1,), (1,), (1,), (0, 1, MAX_NBYTES)))
    whole, shuffled = chance.choice((0.0, 0.5, 0.9, 1.0)), chance.choice((0.0, 0.3, 1.0))
    portions: list[list[Portion]] = [[] for _ in range(world_size)]
    for _ in range(chance.randint(1, 4)):  # in each of these every rank may put all that it does into one group
        for rank, calls in enumerate(_transfers(chance, world_size, sizes)):
            if chance.random() < shuffled:
                chance.shuffle(calls)
            portions[rank] += [calls] if calls and chance.random() < whole else [[each] for each in calls]
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        chance.choice((_swap, _swap, _swap, _merge, _merge, _drop, _redirect, _resize))(chance, portions)
    programs = [_calls(chance, each) for each in portions]
    victim = chance.choice(programs)
    if chance.random() < 0.05 and GroupEnd() in victim:
        del victim[max(place for place, call in enumerate(victim) if isinstance(call, GroupEnd))]
    return programs


def _transfers(chance: random.Random, world_size: int, sizes: Sequence[int]) -> list[Portion]:
    """A ring's step, or a few messages."""
    edges = [(source, (source + 1) % world_size) for source in range(world_size)]
    if chance.random() < 0.4:
        edges = [(chance.randrange(world_size), chance.randrange(world_size)) for _ in range(chance.randint(1, 4))]
    calls: list[Portion] = [[] for _ in range(world_size)]
    for source, target in edges:
        nbytes = chance.choice(sizes)
        calls[source].append(Send(target, nbytes))
        calls[target].append(Recv(source, nbytes))
    return calls


def _calls(chance: random.Random, portions: list[Portion]) -> Program:
    program: Program = []
    for each in portions:
        is_alone = len(each) == 1 and chance.random() < 0.5
        depth = 0 if is_alone else chance.choice((1, 1, 1, 2))
        program += [*[GroupStart()] * depth, *each, *[GroupEnd()] * depth]
    return program


def _somewhere(chance: random.Random, portions: list[list[Portion]]) -> tuple[list[Portion], int, int]:
    """A random transfer: its rank's portions, the number of its portion, and its number there."""
    places = [(here, number) for here in portions for number, each in enumerate(here) if each]
    here, number = chance.choice(places)
    return here, number, chance.randrange(len(here[number]))


def _swap(chance: random.Random, portions: list[list[Portion]]) -> None:
    here, number, _ = _somewhere(chance, portions)
    other = chance.randrange(len(here))
    here[number], here[other] = here[other], here[number]


def _merge(chance: random.Random, portions: list[list[Portion]]) -> None:
    here, number, _ = _somewhere(chance, portions)
    here[number : number + 2] = [[call for each in here[number : number + 2] for call in each]]


def _drop(chance: random.Random, portions: list[list[Portion]]) -> None:
    here, number, place = _somewhere(chance, portions)
    if sum(len(each) for each in here) > 1:
        del here[number][place]


def _redirect(chance: random.Random, portions: list[list[Portion]]) -> None:
    here, number, place = _somewhere(chance, portions)
    call = here[number][place]
    here[number][place] = type(call)(chance.randrange(len(portions)), call.nbytes)


def _resize(chance: random.Random, portions: list[list[Portion]]) -> None:
    here, number, place = _somewhere(chance, portions)
    call = here[number][place]
    here[number][place] = type(call)(call.peer, chance.randint(0, MAX_NBYTES))


@dataclass(eq=False)
class Outcome:
    """What became of the programs.

    Attributes:
        completed: groups of each rank that completed.
        errors: each rank's first.
        is_over: whether all ranks got to the end of their programs without one, and with no group left open.
        wrong: received bytes that are not those of the send in the same place of the edge.
    """

    completed: list[int]
    errors: list[Exception | None]
    is_over: bool = False
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What to wait for.

    Attributes:
        completed: groups of each rank that complete.
        ends: all ranks come to the end of their programs.
        fails: a rank gets an error.
    """

    completed: Sequence[int]
    ends: bool = False
    fails: bool = False


class _World:
    """Ranks as threads, each with a communicator whose edges are all connected."""

    def __init__(self, programs: Sequence[Sequence[Call]]) -> None:
        from cupy.cuda import nccl

        self.nccl, self.programs = nccl, programs
        self.size = len(programs)
        self.unique_id = nccl.get_unique_id()
        self.communicators: list[Any] = [None] * self.size
        self.outcome = Outcome([0] * self.size, [None] * self.size)
        self.depths = [0] * self.size  # of the groups that are open
        self.progress = threading.Condition()
        self.num_ended = 0
        self.stop = threading.Event()
        self.received: list[tuple[int, int, int, torch.Tensor]] = []  # rank, peer, number on the edge
        self.kept: list[torch.Tensor] = []

    def work(self, rank: int) -> None:
        try:
            self._connect(rank)
            self._play(rank)
        except Exception as error:
            with self.progress:
                self.outcome.errors[rank] = error
        with self.progress:
            self.num_ended += 1
            self.progress.notify_all()
        self.stop.wait(PATIENCE_S)
        for _ in range(self.depths[rank]):  # a group that the program left open
            with contextlib.suppress(self.nccl.NcclError):
                self.nccl.groupEnd()

    def wait(self, expected: Expected) -> None:
        """Waits for what is expected; and then a moment, if nothing else should happen."""
        with self.progress:
            self.progress.wait_for(lambda: self._is_as(expected), PATIENCE_S)
            if not expected.ends:
                self.progress.wait_for(lambda: self.num_ended == self.size, BLOCKED_S)

    def found(self) -> Outcome:
        """What is known by now."""
        with self.progress:
            errors, is_over = list(self.outcome.errors), self.num_ended == self.size and not any(self.depths)
            return Outcome(list(self.outcome.completed), errors, is_over and not any(errors))

    def _is_as(self, expected: Expected) -> bool:
        if expected.fails:
            return any(self.outcome.errors)
        if expected.ends:
            return self.num_ended == self.size
        return all(found >= wanted for found, wanted in zip(self.outcome.completed, expected.completed))

    def _connect(self, rank: int) -> None:
        communicator = self.nccl.NcclCommunicator(self.size, self.unique_id, rank)
        self.communicators[rank] = communicator
        memory = torch.zeros(2, dtype=torch.uint8)
        self.nccl.groupStart()
        for peer in range(self.size):
            if peer != rank:
                communicator.send(memory.data_ptr(), 1, self.nccl.NCCL_UINT8, peer, 0)
                communicator.recv(memory.data_ptr() + 1, 1, self.nccl.NCCL_UINT8, peer, 0)
        self.nccl.groupEnd()

    def _play(self, rank: int) -> None:
        pending = 0
        numbers: dict[tuple[type, int], int] = {}
        for call in self.programs[rank]:
            if isinstance(call, GroupStart):
                self.nccl.groupStart()
                self.depths[rank] += 1
                continue
            if isinstance(call, GroupEnd):
                self.depths[rank] -= 1
                self.nccl.groupEnd()
            else:
                number = numbers[type(call), call.peer] = numbers.get((type(call), call.peer), -1) + 1
                self._transfer(rank, call, number)
                pending += 1
            if pending and not self.depths[rank]:
                pending = 0
                with self.progress:
                    self.outcome.completed[rank] += 1
                    self.progress.notify_all()

    def _transfer(self, rank: int, call: Send | Recv, number: int) -> None:
        is_send = isinstance(call, Send)
        memory = torch.full((MAX_NBYTES,), _stamp(rank, number) if is_send else 255, dtype=torch.uint8)
        self.kept.append(memory)
        issue = self.communicators[rank].send if is_send else self.communicators[rank].recv
        issue(memory.data_ptr(), call.nbytes, self.nccl.NCCL_UINT8, call.peer, 0)
        if not is_send:
            self.received.append((rank, call.peer, number, memory[: call.nbytes]))


def _stamp(rank: int, number: int) -> int:
    """What the bytes of a send say: whose it is, and which of its edge."""
    return rank * 50 + number


def play(programs: Sequence[Sequence[Call]], expected: Expected) -> Outcome:
    """Runs the programs until what is expected has happened, and no longer than that and a moment."""
    world = _World(programs)
    threads = [threading.Thread(target=world.work, args=(rank,), daemon=True) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    try:
        world.wait(expected)
        found = world.found()
    finally:
        _end(world, threads)
    if found.is_over:
        found.wrong = [
            f"rank {rank}: receive {number} from rank {peer} holds {memory.tolist()}"
            for rank, peer, number, memory in world.received
            if any(each != _stamp(peer, number) for each in memory.tolist())
        ]
    return found


def _end(world: _World, threads: Sequence[threading.Thread]) -> None:
    for each in world.communicators:
        if each is not None:
            each.abort()
    world.stop.set()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs after its communicator was aborted"

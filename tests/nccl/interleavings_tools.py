"""Collectives of all ranks on fake streams, with what they must give, and with single waits left out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from microddp.lanes import lane_types, row_nbytes_of, slice_of, unit_of
from microddp.plan import LoweringConfig, lower
from microddp.plan.stream_hazards import Collision, collisions, find_sequence_races, find_stream_races
from microddp.plan.streams import StreamProgram, Wait, stream_program
from microddp.schedule import Schedule, schedule
from microddp.staging import StagingPool
from microddp.stream_engine import StreamEngine
from microddp.transport.base import Header
from microddp_kernels.launchers import launcher_for
from microddp_kernels.operators import get_op
from tests.nccl.fake_device import FakeStream, FakeStreamTransport, FakeWait, FakeWorld
from tests.nccl.fake_play import FakeDeadlockError, Player, Strategy, shuffled

__all__ = ["ALGORITHMS", "Case", "NeededWait", "Scenario"]

ALGORITHMS: Final = (
    ("naive", None),
    ("tree", None),
    ("ring", None),
    ("full_ring", None),
    ("full_ring", "rank"),
    ("direct", None),
)

CPU: Final = torch.device("cpu")
NUM_SLICES: Final = 3
MOST: Final = 50  # five of these add up to less than 256, up to which bfloat16 is exact

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """What to run.

    Attributes:
        algorithm, order: as ``all_reduce`` takes them.
        world_size: how many ranks.
        kinds: of collectives that follow each other on the same staging, each for another caller's stream: "float32",
            "bfloat16" (partial folds are wider), "wire" (float32 travels as bfloat16), or "argmax" (two lanes); else
            sums.
    """

    algorithm: str
    order: str | None
    world_size: int
    kinds: tuple[str, ...] = ("float32", "float32")

    def __str__(self) -> str:
        order = f" in {self.order} order" if self.order else ""
        return f"{self.algorithm}{order}, {self.world_size} ranks, {' then '.join(self.kinds)}"


@dataclass(frozen=True, eq=False)
class NeededWait:
    """A wait that a program asks for: its operation there, and what the fake device keeps of it."""

    call: int
    rank: int
    operation: int
    wait: FakeWait
    stream: FakeStream


class _Kind:
    """The plans of all ranks whose chunks have three of the smallest slices, the last one not full."""

    def __init__(self, of: Schedule, name: str) -> None:
        self.op = get_op("argmax" if name == "argmax" else "sum")
        dtypes = {"argmax": (torch.float32, torch.int64), "bfloat16": (torch.bfloat16,)}.get(name, (torch.float32,))
        self.types = lane_types(self.op, dtypes, (1,) * len(dtypes), torch.bfloat16 if name == "wire" else None)
        unit = unit_of(self.types)
        slice_nbytes, _ = slice_of(self.types, 2 * row_nbytes_of(self.types))
        self.num_rows = of.num_chunks * NUM_SLICES * (slice_nbytes // unit) - 1
        config = LoweringConfig(
            slice_nbytes,
            wide=any(each.wide != each.wire for each in self.types),
            wire=any(each.wire != each.data for each in self.types),
        )
        self.plans = [lower(of, rank, self.num_rows, unit, config) for rank in range(of.world_size)]
        assert all(max(each.slice for each in plan.instructions) == NUM_SLICES - 1 for plan in self.plans)
        self.programs = [stream_program(plan, num_lanes=len(self.types)) for plan in self.plans]
        self._collisions: dict[int, list[Collision]] = {}

    def collisions_of(self, rank: int) -> list[Collision]:
        """What the static checker needs to know of a plan, found once."""
        if rank not in self._collisions:
            self._collisions[rank] = collisions(self.plans[rank])
        return self._collisions[rank]


@dataclass(frozen=True, eq=False)
class _Call:
    """One collective on one rank. ``data`` is what is worked on; every other one is stored elsewhere by the engine."""

    kind: _Kind
    inputs: Tensors
    data: Tensors
    stored: Tensors
    results: Tensors
    expected: Tensors


class Scenario:
    """A case, enqueued on the fake streams of all its ranks.

    Each call's tensors are written on its caller's stream; there they are read afterwards, and written again. The
    second call's result is stored in another tensor by the engine, as those of strided tensors are.

    Attributes:
        player: plays it.
        waits: those of the programs, of all ranks and calls.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.world = FakeWorld(case.world_size)
        self._transports = self.world.transports()
        self._pools = [StagingPool() for _ in self._transports]
        engines = [StreamEngine(each, launcher_for(CPU), pool) for each, pool in zip(self._transports, self._pools)]
        of = schedule(case.algorithm, case.world_size, order=case.order)
        self._kinds = {name: _Kind(of, name) for name in case.kinds}
        self.waits: list[NeededWait] = []
        self._calls: list[_Call] = []
        for number, name in enumerate(case.kinds):
            calls = _make_calls(self._kinds[name], case.world_size, seed + number)
            self._calls += calls
            for call, transport, engine in zip(calls, self._transports, engines):
                self._enqueue(number, call, transport, engine)
        touched = [tensor for call in self._calls for tensor in (*call.data, *call.stored, *call.results)]
        self._memory = [tensor.view(torch.uint8).numpy().data for tensor in touched]
        self.player = Player(self.world)
        self._poison = [b"\xff" * each.nbytes for each in self._memory]

    def is_right(self, player: Player, seed: int, strategy: Strategy = shuffled) -> bool:
        """Plays once, from poisoned memory; whether all ranks then have the right result of every call."""
        for pool in self._pools:
            pool.poison()
        for memory, poison in zip(self._memory, self._poison):
            memory[:] = poison
        player.play(seed, strategy)
        return all(
            torch.equal(found, expected) for call in self._calls for found, expected in zip(call.results, call.expected)
        )

    def memory(self) -> Iterator[torch.Tensor]:
        """The bytes of all that a play writes."""
        for call in self._calls:
            yield from (each.view(torch.uint8) for each in (*call.data, *call.stored, *call.results))
        for rank, pool in enumerate(self._pools):
            for kind in self._kinds.values():
                for lane in pool.buffers(kind.plans[rank], kind.types, CPU):
                    yield from (each.view(torch.uint8) for each in lane)

    def fails(self, player: Player, seed: int, strategy: Strategy = shuffled) -> bool:
        """Whether a play ends wrong, or not at all."""
        try:
            return not self.is_right(player, seed, strategy)
        except FakeDeadlockError:
            return True

    def is_caught_statically(self, each: NeededWait) -> bool:
        """Whether the checker of stream programs, alone, finds that a wait is missing."""
        kind = self._kinds[self.case.kinds[each.call]]
        program = kind.programs[each.rank]
        without = program.operations[: each.operation] + program.operations[each.operation + 1 :]
        broken = replace(program, operations=without)
        if find_stream_races(broken, kind.collisions_of(each.rank)):
            return True
        return bool(find_sequence_races(program, broken) or find_sequence_races(broken, program))

    def _enqueue(self, number: int, call: _Call, transport: FakeStreamTransport, engine: StreamEngine) -> None:
        runtime, rank, kind = transport.runtime, transport.rank, call.kind
        if number:
            runtime.caller = runtime.new_stream()
            runtime.caller.name = f"caller {number}"
        caller = runtime.caller
        with runtime.on(caller):
            runtime.launch(caller, partial(_copy, call.data, call.inputs))
        before = len(runtime.waits)
        header = Header(number, "all_reduce", self.case.algorithm, kind.op.name, "any", (kind.num_rows,), 0, 64)
        data = call.data if len(call.data) > 1 else call.data[0]
        deadline = time.monotonic() + 60.0
        store = partial(_copy, call.stored, call.data) if number % 2 else None
        done = engine.run(kind.plans[rank], data, kind.op, header, deadline, types=kind.types, store=store)
        self._note_waits(number, kind.programs[rank], rank, runtime.waits[before:])
        done.join()
        with runtime.on(caller):
            runtime.launch(caller, partial(_copy, call.results, call.stored if number % 2 else call.data))
            runtime.launch(caller, partial(_copy, call.data, call.inputs))

    def _note_waits(self, call: int, program: StreamProgram, rank: int, waits: Sequence[FakeWait]) -> None:
        operations = [number for number, each in enumerate(program.operations) if isinstance(each, Wait)]
        assert len(waits) == len(operations), "the engine waits for something else than its program says"
        where = {each: stream for stream in self.world.streams for each in stream.operations}
        self.waits += [NeededWait(call, rank, *pair, where[pair[1]]) for pair in zip(operations, waits)]


def _make_calls(kind: _Kind, world_size: int, seed: int) -> list[_Call]:
    """Inputs of few bits, so that every sum is exact, and what all ranks must get from them."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(1, MOST + 1, (world_size, kind.num_rows), generator=random)
    expected, inputs = (_argmax if len(kind.types) > 1 else _sum)(values)
    dtypes = [each.data for each in kind.types]
    wanted = tuple(each.to(dtype) for each, dtype in zip(expected, dtypes))

    def fresh() -> Tensors:
        return tuple(torch.empty(kind.num_rows, dtype=dtype) for dtype in dtypes)

    return [
        _Call(
            kind,
            tuple(each.to(dtype) for each, dtype in zip(lanes, dtypes)),
            fresh(),
            fresh(),
            fresh(),
            wanted,
        )
        for lanes in inputs
    ]


def _sum(values: torch.Tensor) -> tuple[Tensors, Iterator[Tensors]]:
    """What sums must give, in integers, and each rank's input."""
    return (values.sum(0),), ((each,) for each in values)


def _argmax(values: torch.Tensor) -> tuple[Tensors, Iterator[Tensors]]:
    """The largest of few values, and of those that tie the lowest index; indices run against the ranks."""
    values = values % 4
    world_size, num_rows = values.shape
    indices = torch.arange(world_size * num_rows).view(world_size, num_rows).flip(0)
    pairs = [
        max(zip(column, (-each for each in places))) for column, places in zip(values.T.tolist(), indices.T.tolist())
    ]
    best = tuple(torch.tensor(each) for each in zip(*((value, -index) for value, index in pairs)))
    return best, zip(values, indices)


def _copy(outs: Tensors, sources: Tensors) -> None:
    for out, source in zip(outs, sources):
        out.copy_(source)

"""Stream programs as the tests see them: edited, made up, and run by a plain model of the streams of all ranks."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from microddp.plan import Plan, StreamProgram, derive, lower, stream_program
from microddp.plan.instructions import DATA, Buffer, Instruction, Recv, RecvCombine, Send, Span
from microddp.plan.streams import Group, Launch, Operation, Record, StreamName, Wait
from tests.plan.cells import Cell, cells

CALLER, GROUPS, KERNELS = StreamName.CALLER, StreamName.GROUPS, StreamName.KERNELS


def lowered(cell: Cell) -> list[Plan]:
    """The plans of a cell as streams get them: never hoisted."""
    ranks = range(cell.schedule.world_size)
    return [lower(cell.schedule, rank, cell.numel, cell.itemsize, cell.config()) for rank in ranks]


def sampled_programs(world_sizes: Sequence[int], count: int) -> Iterator[StreamProgram]:
    """The programs of all ranks of the matrix of plans; two lanes and groups of four now and then."""
    for number, cell in enumerate(cells(world_sizes, count)):
        for plan in lowered(cell):
            yield stream_program(plan, max_group=256 if number % 3 else 4, num_lanes=1 + (number % 6 == 0))


def without(program: StreamProgram, number: int) -> StreamProgram:
    """Without one operation."""
    return replace(program, operations=program.operations[:number] + program.operations[number + 1 :])


def moved(program: StreamProgram, number: int, target: int) -> StreamProgram:
    """With one operation at another place."""
    operations = list(program.operations)
    operations.insert(target, operations.pop(number))
    return replace(program, operations=tuple(operations))


def stream_of(operation: Operation) -> StreamName:
    if isinstance(operation, Group):
        return GROUPS
    return KERNELS if isinstance(operation, Launch) else operation.stream


def is_work(operation: Operation) -> bool:
    return isinstance(operation, (Group, Launch))


def indices_of(operation: Operation) -> tuple[int, ...]:
    """The instructions that an operation plays."""
    if isinstance(operation, Group):
        return operation.indices
    return (operation.index,) if isinstance(operation, Launch) else ()


def plan_of(*instructions: Instruction) -> Plan:
    """A plan of rank 1 of 3, with 16 elements of data and a slot of 8."""
    buffers = (Buffer("data", 16), Buffer("A", 8))
    return Plan(1, 3, 16, 4, buffers, instructions, derive(instructions), 8)


def is_split(program: StreamProgram) -> bool:
    """Whether some groups are of one step and slice."""
    keys = [key_of(program, each) for each in program.operations if isinstance(each, Group)]
    return len(keys) > len(set(keys))


def key_of(program: StreamProgram, group: Group) -> tuple[int, int]:
    instruction = program.plan.instructions[group.indices[0]]
    return instruction.step, instruction.slice


def regrouped(program: StreamProgram, cut: Callable[[Plan, tuple[int, ...]], list[tuple[int, ...]]]) -> StreamProgram:
    """With every group cut in pieces."""
    operations: list[Any] = []
    for each in program.operations:
        operations += [Group(part) for part in cut(program.plan, each.indices)] if isinstance(each, Group) else [each]
    return replace(program, operations=tuple(operations))


def one_by_one(program: StreamProgram) -> StreamProgram:
    return regrouped(program, lambda plan, indices: [(index,) for index in indices])


def receives_first(program: StreamProgram) -> StreamProgram:
    def cut(plan: Plan, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
        halves = [tuple(i for i in indices if isinstance(plan.instructions[i], kind)) for kind in (Recv, Send)]
        return [half for half in halves if half]

    return regrouped(program, cut)


def groups_at(program: StreamProgram) -> list[int]:
    return [at for at, each in enumerate(program.operations) if isinstance(each, Group)]


def disturbed(program: StreamProgram, chance: random.Random) -> StreamProgram:
    """With one group cut in two, or two neighbours made one, or swapped; waits and records stay where they are."""
    at = groups_at(program)
    if not at:
        return program
    place = chance.randrange(len(at))
    here = program.operations[at[place]]
    assert isinstance(here, Group)
    if chance.random() < 0.5 and len(here.indices) > 1:
        indices = chance.sample(here.indices, len(here.indices))
        parts = tuple(sorted(indices[:1])), tuple(sorted(indices[1:]))
        pieces: tuple[Any, ...] = (Group(parts[0]), Group(parts[1]))
        return replace(
            program, operations=(*program.operations[: at[place]], *pieces, *program.operations[at[place] + 1 :])
        )
    if place + 1 == len(at):
        return program
    following = program.operations[at[place + 1]]
    assert isinstance(following, Group)
    if chance.random() < 0.5:
        return moved(program, at[place + 1], at[place])
    joined = list(program.operations)
    joined[at[place]] = Group(here.indices + following.indices)
    return without(replace(program, operations=tuple(joined)), at[place + 1])


def exchange_plans(world_size: int, chance: random.Random, *, most: int, steps: int = 2) -> list[Plan]:
    """Plans that only exchange, to no purpose: in each step up to ``most`` messages of different lengths on each edge.

    Each rank names its transfers of a step in an order of its own, but those of one edge as the other end does.
    """
    programs: list[list[Instruction]] = [[] for _ in range(world_size)]
    used = [0] * world_size
    for step in range(steps):
        lengths: dict[tuple[int, int], list[int]] = {
            (source, target): [chance.randint(1, 3) for _ in range(chance.randint(0, most))]
            for source in range(world_size)
            for target in range(world_size)
            if source != target
        }
        for rank, program in enumerate(programs):
            todo = {edge: iter(each) for edge, each in lengths.items() if rank in edge}
            order = [edge for edge in todo for _ in lengths[edge]]
            chance.shuffle(order)
            for source, target in order:
                start = used[rank]
                used[rank] += next(todo[source, target])
                span = Span(DATA, start, used[rank])
                program.append(Send(step, 0, target, span) if source == rank else Recv(step, 0, source, span))
    return [
        Plan(rank, world_size, numel, 4, (Buffer("data", numel),), tuple(program), derive(program), 4)
        for rank, (numel, program) in enumerate(zip(used, programs))
    ]


def comes_to_an_end(programs: Sequence[StreamProgram]) -> bool:
    """Runs the streams of all ranks as NCCL would, one move at a time until nothing moves; whether all got through."""
    queues = {
        (rank, stream): deque(each for each in program.operations if stream_of(each) is stream)
        for rank, program in enumerate(programs)
        for stream in StreamName
    }
    recorded: set[tuple[int, int]] = set()
    begun: Counter[tuple[int, int]] = Counter()  # messages by (source, target) whose send's group has started
    ready: Counter[tuple[int, int]] = Counter()  # and whose receive's group has
    started: dict[int, list[tuple[Counter[tuple[int, int]], tuple[int, int], int]]] = {}

    def move(rank: int, operation: Operation) -> bool:
        if isinstance(operation, Record):
            recorded.add((rank, operation.event))
        elif isinstance(operation, Wait):
            return (rank, operation.event) in recorded
        elif isinstance(operation, Group):
            if rank not in started:
                started[rank] = []
                for index in operation.indices:
                    here = programs[rank].plan.instructions[index]
                    assert isinstance(here, (Send, Recv, RecvCombine))
                    is_send = isinstance(here, Send)
                    edge = (rank, here.peer) if is_send else (here.peer, rank)
                    mine, theirs = (begun, ready) if is_send else (ready, begun)
                    mine[edge] += 1
                    started[rank].append((theirs, edge, mine[edge]))
            if any(theirs[edge] < number for theirs, edge, number in started[rank]):
                return False
            del started[rank]
        return True

    moved_any = True
    while moved_any:
        moved_any = False
        for (rank, _), queue in queues.items():
            while queue and move(rank, queue[0]):
                queue.popleft()
                moved_any = True
    return not any(queues.values())

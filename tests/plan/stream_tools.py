"""Stream programs as the tests see them: edited, made up, and run by a plain model of the streams of all ranks."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

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

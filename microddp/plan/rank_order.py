"""Proves that the stream programs of all ranks together come to an end: no ranks wait for each other in a cycle.

The model of a communicator such as NCCL's: what one rank enqueues on GROUPS runs in that order. A group starts when the
one before it is complete and its waits are met; it is complete once, for each of its messages, the group at the other
end has started. The k-th send from one rank to another is the k-th receive there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from microddp.errors import PlanError
from microddp.plan.instructions import Recv, RecvCombine, Send
from microddp.plan.stream_form import check_form
from microddp.plan.streams import Group, Launch, Record, StreamName, StreamProgram
from microddp.plan.wait_graph import WaitGraph

__all__ = ["check_ranks"]


def check_ranks(programs: Sequence[StreamProgram]) -> None:
    """Checks that messages match and that nothing waits for itself, whatever the timing.

    Args:
        programs: one for each rank, in order.

    Raises:
        PlanError: a malformed program; a peer that does not exist; a message without its other end; groups in another
            order at its two ends, or of other lengths; or a cycle, the shortest of which is told.
        ValueError: not one program for each rank.
    """
    found = [(each.plan.rank, each.plan.world_size) for each in programs]
    if found != [(rank, len(programs)) for rank in range(len(programs))]:
        raise ValueError(f"expected a program for each of {len(programs)} ranks, got (rank, world_size) {found}")
    graph = WaitGraph()
    sent: dict[_Edge, list[_End]] = {}
    received: dict[_Edge, list[_End]] = {}
    for each in programs:
        check_form(each)
        _add_rank(graph, each, sent, received)
    for edge in sorted(sent.keys() | received.keys()):
        sends, receives = sent.get(edge, []), received.get(edge, [])
        _check_edge(edge, sends, receives)
        for send, receive in zip(sends, receives):
            graph.wait(send.complete, receive.start)
            graph.wait(receive.complete, send.start)
    cycle = graph.shortest_cycle()
    if cycle:
        first, *others = cycle
        raise PlanError(f"the ranks wait in a cycle: {first} waits for {', which waits for '.join([*others, first])}")


_Edge = tuple[int, int]  # (source, target)


@dataclass(frozen=True, slots=True)
class _Place:
    """A group, or a launch, of one rank; in the words of an error."""

    rank: int
    kind: str
    number: int
    key: tuple[int, int]

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} {self.number} (step {self.key[0]} slice {self.key[1]})"


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a message, and the nodes of its group."""

    place: _Place
    key: tuple[int, int]
    numel: int
    start: int
    complete: int

    def __str__(self) -> str:
        return f"rank {self.place.rank} group {self.place.number} (step {self.key[0]} slice {self.key[1]})"


def _add_rank(
    graph: WaitGraph, program: StreamProgram, sent: dict[_Edge, list[_End]], received: dict[_Edge, list[_End]]
) -> None:
    """Adds one rank's operations to the graph, and the ends of its messages to ``sent`` and ``received``."""
    plan, num_groups = program.plan, 0
    last: dict[StreamName, int] = {}  # the node that stands for all that was enqueued on a stream
    events: dict[int, int | None] = {}
    for each in program.operations:
        if isinstance(each, Group):
            places = [(index, _key(program, index)) for index in each.indices]
            place = _Place(plan.rank, "group", num_groups, places[0][1])
            num_groups += 1
            start = graph.node(place, last.get(StreamName.GROUPS))
            complete = last[StreamName.GROUPS] = graph.node(place, start)
            for index, key in places:
                edge, numel = _message(program, index)
                ends = (sent if edge[0] == plan.rank else received).setdefault(edge, [])
                ends.append(_End(place, key, numel, start, complete))
        elif isinstance(each, Launch):
            place = _Place(plan.rank, "instruction", each.index, _key(program, each.index))
            last[StreamName.KERNELS] = graph.node(place, last.get(StreamName.KERNELS))
        elif isinstance(each, Record):
            events[each.event] = last.get(each.stream)
        else:
            last[each.stream] = graph.node(None, last.get(each.stream), events[each.event])


def _key(program: StreamProgram, index: int) -> tuple[int, int]:
    instruction = program.plan.instructions[index]
    return instruction.step, instruction.slice


def _message(program: StreamProgram, index: int) -> tuple[_Edge, int]:
    """The edge and the number of elements of a transfer."""
    plan = program.plan
    instruction = plan.instructions[index]
    assert isinstance(instruction, (Send, Recv, RecvCombine))  # check_form has seen to it
    if instruction.peer == plan.rank or not 0 <= instruction.peer < plan.world_size:
        where = f"rank {plan.rank}: instruction {index}, {instruction},"
        raise PlanError(f"{where} has peer {instruction.peer}, which is no other of {plan.world_size} ranks")
    if isinstance(instruction, Send):
        return (plan.rank, instruction.peer), len(instruction.source)
    return (instruction.peer, plan.rank), len(instruction.out)


def _check_edge(edge: _Edge, sends: Sequence[_End], receives: Sequence[_End]) -> None:
    source, target = edge
    pairs = enumerate(zip(sends, receives))
    number = next((at for at, (send, receive) in pairs if send.key != receive.key), min(len(sends), len(receives)))
    if len(sends) != len(receives):
        lone = (sends if len(sends) > len(receives) else receives)[number]
        counts = f"rank {source} sends {len(sends)} messages to rank {target}, which receives {len(receives)} of them"
        raise PlanError(f"{counts}: unmatched is message {number}, that of {lone}")
    if number < len(sends):
        both = f"{sends[number]} sends what {receives[number]} receives"
        in_order = Counter(each.key for each in sends) != Counter(each.key for each in receives)
        text = "is not the same at both ends" if in_order else "stands in different order at its ends"
        raise PlanError(f"message {number} from rank {source} to rank {target} {text}: {both}")
    for send, receive in zip(sends, receives):
        if send.numel != receive.numel:
            raise PlanError(f"{send} sends {send.numel} elements, {receive} receives {receive.numel}")

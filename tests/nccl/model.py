"""A model of NCCL's queue rules: judges what ranks' host calls lead to, without running anything.

The rules:

* An operation outside a group is a group of its own. Groups may be nested; the outermost end submits.
* The groups of one communicator run one after the other in issue order, whatever streams they name.
* Within a group all operations progress at once; the group is complete when they all are.
* The k-th send from a to b meets the k-th receive at b from a. Both ends complete together, once both groups run.
* A rank's transfers with itself meet in their own group; if they do not fit, the group is refused as a whole, and in
  the model the rank goes no further.

NCCL may buffer a small send and go on before it was met; the model never does. So it is stricter: what it calls a
deadlock may pass on a device as long as messages are small, and what it lets pass does pass.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from tests.nccl.model_calls import (
    Call,
    CountMismatch,
    Deadlock,
    GroupEnd,
    GroupOrder,
    GroupStart,
    OpenGroup,
    Place,
    Problem,
    Recv,
    Send,
    StrayEnd,
    Ungrouped,
    Unmatched,
    Verdict,
    Wait,
    ZeroBytes,
)

__all__ = ["GroupEnd", "GroupStart", "Recv", "Send", "Verdict", "judge"]

Group = list[Place]


def judge(programs: Sequence[Sequence[Call]]) -> Verdict:
    """What becomes of the calls of all ranks, ``programs[rank]`` in issue order, on one communicator."""
    problems: list[Problem] = []
    queues = []
    for rank, program in enumerate(programs):
        groups, found = _submitted(rank, program)
        queues.append(groups)
        problems += found
    other, found = _match(queues)
    problems += found
    _refuse(queues, other, found)
    heads, remaining = _run(queues, other)
    problems += _deadlocks(remaining, other)
    places = [place for groups in queues for group in groups for place in group]
    problems += [ZeroBytes(each) for each in places if not each.call.nbytes]
    return Verdict(tuple(problems), tuple(heads))


def _submitted(rank: int, program: Sequence[Call]) -> tuple[list[Group], list[Problem]]:
    """The groups in the order in which the host submits them, and what is wrong with how they are formed."""
    groups: list[Group] = []
    problems: list[Problem] = []
    pending: Group = []
    starts: list[int] = []
    for index, call in enumerate(program):
        if isinstance(call, GroupStart):
            starts.append(index)
        elif isinstance(call, GroupEnd):
            if not starts:
                problems.append(StrayEnd(rank, index))
                continue
            starts.pop()
            if not starts and pending:
                groups.append(pending)
                pending = []
        elif starts:
            pending.append(Place(rank, index, call))
        else:
            groups.append([Place(rank, index, call)])
            problems.append(Ungrouped(groups[-1][0]))
    if starts:
        problems.append(OpenGroup(rank, starts[0], tuple(pending)))
    return groups, problems


def _match(queues: Sequence[list[Group]]) -> tuple[dict[Place, Place], list[Problem]]:
    """The other end of each place, where there is one, and what is wrong with the pairs."""
    edges: dict[object, tuple[Group, Group]] = defaultdict(lambda: ([], []))
    for rank, groups in enumerate(queues):
        for number, group in enumerate(groups):
            for place in group:
                is_recv = isinstance(place.call, Recv)
                ends = (place.call.peer, rank) if is_recv else (rank, place.call.peer)
                group_of_own = number if place.call.peer == rank else None
                edges[ends, group_of_own][is_recv].append(place)
    other: dict[Place, Place] = {}
    problems: list[Problem] = []
    for sends, recvs in edges.values():
        for send, recv in zip(sends, recvs):
            other[send], other[recv] = recv, send
        common = min(len(sends), len(recvs))
        problems += [Unmatched(each) for each in (*sends[common:], *recvs[common:])]
        pairs = list(zip(sends, recvs))
        problems += [CountMismatch(*pair) for pair in pairs if pair[0].call.nbytes != pair[1].call.nbytes]
        problems += _order_problems(sends, recvs)
    return other, problems


def _order_problems(sends: Group, recvs: Group) -> Iterator[Problem]:
    """The first pair of an edge whose labels differ, if both ends have the same labels in another order."""
    sent, received = ([each.call.label for each in places] for places in (sends, recvs))
    if None in sent or sent == received or sorted(map(repr, sent)) != sorted(map(repr, received)):
        return
    yield next(GroupOrder(*pair) for pair in zip(sends, recvs) if pair[0].call.label != pair[1].call.label)


def _refuse(queues: Sequence[list[Group]], other: dict[Place, Place], problems: Sequence[Problem]) -> None:
    """Takes apart what would meet in groups that are refused, since a transfer with oneself does not fit there."""
    refused = {each.place for each in problems if isinstance(each, Unmatched)}
    refused |= {each.send for each in problems if isinstance(each, CountMismatch)}
    refused = {each for each in refused if each.rank == each.call.peer}
    for group in (group for groups in queues for group in groups):
        if not refused.isdisjoint(group):
            for place in group:
                other.pop(other.pop(place, place), None)


def _deadlocks(remaining: Sequence[set[Place]], other: dict[Place, Place]) -> Iterator[Problem]:
    """Looks for cycles among what waits when nothing moves any more."""
    running = {rank: left for rank, left in enumerate(remaining) if left}
    waits: dict[int, dict[int, tuple[Place, Place]]] = {rank: {} for rank in running}
    for rank, left in running.items():
        for place in sorted(left, key=lambda each: each.index):
            awaited = other.get(place)
            if awaited is not None and awaited.rank in running:
                waits[rank].setdefault(awaited.rank, (place, awaited))
    told: set[int] = set()
    for rank in sorted(waits):
        path = [] if rank in told else _shortest_cycle(rank, waits)
        if path:
            told.update(path)
            links = [waits[first][second] for first, second in zip(path, (*path[1:], path[0]))]
            behind = [*(place for place, _ in links[1:]), links[0][0]]
            yield Deadlock(tuple(Wait(*link, last) for link, last in zip(links, behind)))


def _run(queues: Sequence[list[Group]], other: dict[Place, Place]) -> tuple[list[int], list[set[Place]]]:
    """Runs the queues until nothing moves: how many groups complete, and what each rank's next one still waits for.

    The order of steps does not matter: what may move stays so.
    """
    heads = [0] * len(queues)
    remaining = [set(groups[0]) if groups else set() for groups in queues]
    changed = deque(range(len(queues)))
    while changed:
        rank = changed.popleft()
        for place in list(remaining[rank]):
            end = other.get(place)
            if end is not None and end in remaining[end.rank]:
                remaining[rank].discard(place)
                remaining[end.rank].discard(end)
                changed.extend(_advance(end.rank, queues, heads, remaining))
        changed.extend(_advance(rank, queues, heads, remaining))
    return heads, remaining


def _advance(rank: int, queues: Sequence[list[Group]], heads: list[int], remaining: list[set[Place]]) -> Iterable[int]:
    """Begins the next group of a rank if its current one is complete; says then that the rank has news."""
    if remaining[rank] or heads[rank] == len(queues[rank]):
        return ()
    heads[rank] += 1
    if heads[rank] < len(queues[rank]):
        remaining[rank] = set(queues[rank][heads[rank]])
    return (rank,)


def _shortest_cycle(start: int, waits: dict[int, dict[int, tuple[Place, Place]]]) -> list[int]:
    """The ranks of a shortest cycle through ``start``, from it on; none: empty."""
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for peer in waits.get(rank, ()):
            if peer == start:
                path = [rank]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if peer not in came_from:
                came_from[peer] = rank
                queue.append(peer)
    return []

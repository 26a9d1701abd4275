"""The host calls that the model of NCCL's queue rules takes, and the problems that it finds in them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

__all__ = [
    "Call",
    "CountMismatch",
    "Deadlock",
    "GroupEnd",
    "GroupOrder",
    "GroupStart",
    "OpenGroup",
    "Place",
    "Problem",
    "Recv",
    "Send",
    "StrayEnd",
    "Ungrouped",
    "Unmatched",
    "Verdict",
    "Wait",
    "ZeroBytes",
]


@dataclass(frozen=True, slots=True)
class GroupStart:
    """``groupStart()``."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """``groupEnd()``."""


@dataclass(frozen=True, slots=True)
class Send:
    """``send``: ``nbytes`` to ``peer`` on ``stream``; ``label`` tells what is meant to travel, if that is known."""

    peer: int
    nbytes: int
    stream: int = 0
    label: Hashable = None

    def __str__(self) -> str:
        return f"send→{self.peer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """``recv``: ``nbytes`` from ``peer`` on ``stream``; ``label`` as in ``Send``."""

    peer: int
    nbytes: int
    stream: int = 0
    label: Hashable = None

    def __str__(self) -> str:
        return f"recv←{self.peer}"


Call: TypeAlias = GroupStart | GroupEnd | Send | Recv


@dataclass(frozen=True, slots=True)
class Place:
    """A transfer among a rank's calls; ``index`` counts all of them, from 0."""

    rank: int
    index: int
    call: Send | Recv

    def __str__(self) -> str:
        return f"rank {self.rank} {self.call} (call {self.index})"


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with the calls. ``blocks``: they do not all complete because of it."""

    blocks: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Wait:
    """``place`` waits for its other end, ``awaited``, which is not at the head of its rank's queue: ``behind`` is."""

    place: Place
    awaited: Place
    behind: Place


@dataclass(frozen=True)
class Deadlock(Problem):
    """Each wait's ``behind`` is the next one's ``place``, and the last one's the first's."""

    cycle: tuple[Wait, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(each.place.rank for each in self.cycle)

    def __str__(self) -> str:
        links = (f"waits for {each.awaited}, which waits behind {each.behind}" for each in self.cycle)
        return f"deadlock: {self.cycle[0].place} " + ", which ".join(links)


@dataclass(frozen=True)
class CountMismatch(Problem):
    """The two ends of a transfer name different numbers of bytes. NCCL hangs or corrupts; it need not notice."""

    send: Place
    recv: Place

    def __str__(self) -> str:
        return f"{self.send} of {self.send.call.nbytes} bytes meets {self.recv} of {self.recv.call.nbytes} bytes"


@dataclass(frozen=True)
class Unmatched(Problem):
    """A transfer whose peer never posts the other end; of one with itself, not in the same group."""

    place: Place

    def __str__(self) -> str:
        if self.place.rank == self.place.call.peer:
            return f"{self.place} has no other end in its own group"
        return f"{self.place}: rank {self.place.call.peer} never posts its other end"


@dataclass(frozen=True)
class GroupOrder(Problem):
    """The two ends issue the same transfers of an edge in different orders: what arrives is not what is expected."""

    blocks: ClassVar[bool] = False
    send: Place
    recv: Place

    def __str__(self) -> str:
        return f"{self.send} carries {self.send.call.label}, but {self.recv} expects {self.recv.call.label}"


@dataclass(frozen=True)
class Ungrouped(Problem):
    """A transfer outside any group: legal, but it keeps all later ones of its communicator waiting until it is met."""

    blocks: ClassVar[bool] = False
    place: Place

    def __str__(self) -> str:
        return f"{self.place} stands outside any group"


@dataclass(frozen=True)
class OpenGroup(Problem):
    """A group that is never ended: what is in it never starts."""

    rank: int
    index: int
    places: tuple[Place, ...]

    def __str__(self) -> str:
        held = ", ".join(f"{each.call} (call {each.index})" for each in self.places) or "nothing"
        return f"rank {self.rank} never ends the group of call {self.index}, which holds {held}"


@dataclass(frozen=True)
class StrayEnd(Problem):
    """``groupEnd`` without a group. NCCL refuses it."""

    rank: int
    index: int

    def __str__(self) -> str:
        return f"rank {self.rank} ends a group that was never started (call {self.index})"


@dataclass(frozen=True)
class ZeroBytes(Problem):
    """A transfer of nothing. The model lets it match like any other; the transport is to leave it out on both ends."""

    blocks: ClassVar[bool] = False
    place: Place

    def __str__(self) -> str:
        return f"{self.place} moves no bytes"


@dataclass(frozen=True)
class Verdict:
    """All that is wrong with a set of calls, and how far the ranks get.

    ``completed[rank]`` counts the groups that complete; transfers whose byte counts differ are taken to complete.
    """

    problems: tuple[Problem, ...]
    completed: tuple[int, ...] = ()

    @property
    def completes(self) -> bool:
        """Whether every transfer completes, right or wrong."""
        return not any(each.blocks for each in self.problems)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.name for each in self.problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __str__(self) -> str:
        return "\n".join(f"{each.name}: {each}" for each in self.problems) or "Completes"

"""One rank's part in a world of threads: its state, its current collective, and the transfers it posted."""

from __future__ import annotations

import threading

from microddp.errors import MismatchError
from microddp.transport.base import Header, Kind, Transfer
from microddp.transport.thread_failure import call_text

__all__ = ["Awaited", "Call", "Meeting", "Pair", "Pending", "RankState", "awaited_text", "missing_ranks", "move"]


class Meeting:
    """Who has entered one collective; ``done`` when every rank has."""

    __slots__ = ("done", "first_rank", "header", "opened", "rejected")

    def __init__(self) -> None:
        self.header: Header | None = None
        self.first_rank = -1
        self.opened: set[int] = set()
        self.rejected: dict[int, BaseException] = {}
        self.done = False


class Call:
    """One collective on one rank: its header, deadline, meeting and every transfer that it posted."""

    __slots__ = ("deadline", "header", "meeting", "posted", "state")

    def __init__(self, state: RankState, header: Header, deadline: float, meeting: Meeting) -> None:
        self.state = state
        self.header = header
        self.deadline = deadline
        self.meeting = meeting
        self.posted: list[Pending] = []


class Pending:
    """One posted transfer. ``mover`` is the ident of the thread that moves its data, 0 while there is none."""

    __slots__ = ("call", "done", "is_send", "mover", "transfer")

    def __init__(self, call: Call, transfer: Transfer) -> None:
        self.call = call
        self.transfer = transfer
        self.is_send = transfer.kind is Kind.SEND
        self.mover = 0
        self.done = False


Pair = tuple[Pending, Pending]  # the sender's end, the receiver's end
Awaited = Pending | Meeting


class RankState:
    """One rank, as the others see it. ``parker`` is held except between a wake-up and the sleeper's return."""

    __slots__ = ("awaiting", "call", "closed", "parker", "rank", "sequence")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parker = threading.Lock()
        self.parker.acquire()
        self.awaiting: Awaited | None = None
        self.call: Call | None = None
        self.closed = False
        self.sequence = -1

    def is_asleep(self) -> bool:
        """Whether nobody has woken the rank since it began to wait. With the world's lock held."""
        return self.awaiting is not None

    def wake(self) -> None:
        """Lets the rank's thread look again, if it sleeps. With the world's lock held."""
        if self.awaiting is not None:
            self.awaiting = None
            self.parker.release()

    def progress(self, header: Header) -> str:
        """How far the rank is, seen from collective ``header``, for error texts."""
        if self.sequence < header.sequence:
            return "has not entered it"
        if self.call is None:
            return f"has left collective {self.sequence}"
        return f"is in {call_text(self.call.header)} and has posted nothing that matches"


def missing_ranks(awaited: Awaited, world_size: int) -> list[int]:
    """The ranks without which ``awaited`` cannot complete; none once its data is on the move."""
    if isinstance(awaited, Meeting):
        return [rank for rank in range(world_size) if rank not in awaited.opened]
    return [] if awaited.done or awaited.mover else [awaited.transfer.peer]


def awaited_text(call: Call, awaited: Awaited, world_size: int) -> str:
    """What the rank is doing while it waits, for error texts."""
    where = call_text(call.header)
    if isinstance(awaited, Meeting):
        names = ", ".join(str(rank) for rank in missing_ranks(awaited, world_size))
        return f"waiting for rank {names} to enter {where}, at its end"
    transfer = awaited.transfer
    return f"waiting for rank {transfer.peer} in {where}, step {transfer.step} ({transfer.kind.value})"


def move(source: Pending, target: Pending) -> None:
    """Moves one message: copies it into the receiver's view, or hands the sender's view to ``combine``.

    Raises:
        MismatchError: the two ends disagree about the message; never copied in part.
    """
    sent, received = source.transfer, target.transfer
    if (
        sent.view.dtype != received.view.dtype
        or sent.view.numel() != received.view.numel()
        or source.call.header.sequence != target.call.header.sequence
    ):
        raise MismatchError(f"{_end_text(source, 'sends')}, {_end_text(target, 'expects')}")
    if received.kind is Kind.RECV:
        received.view.copy_(sent.view)
    elif received.combine is not None:
        received.combine(sent.view)


def _end_text(end: Pending, verb: str) -> str:
    view, call = end.transfer.view, end.call
    where = f"{call_text(call.header)}, step {end.transfer.step}"
    return f"rank {call.state.rank} {verb} {view.numel()} elements of {view.dtype} in {where}"

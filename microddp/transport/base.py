"""The contract between the engine and whatever moves the bytes.

Laws that every transport keeps:

* A send completes when its reader is done with the sender's memory, not when it was buffered.
* Transfers between two ranks, in one direction, match in posting order.
* ``post`` never blocks on a host transport; ``wait`` may progress any posted transfer of the exchange.
* A failure on one rank reaches every rank: no rank waits for one that has failed.
* What is counted is what was moved: ``counters`` are written here, never derived from a schedule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch

__all__ = [
    "Counters",
    "Exchange",
    "Header",
    "Kind",
    "Transfer",
    "Transport",
]

Event = Any  # a transport's own token for "this transfer is complete"


class Kind(Enum):
    """What a transfer does at this end."""

    SEND = "send"
    RECV = "recv"
    RECV_COMBINE = "recv_combine"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of one message.

    Attributes:
        kind: send, receive into ``view``, or receive and combine.
        peer: the other rank.
        step: the schedule's step that this transfer belongs to (for counters and error texts).
        view: 1-D, contiguous, never empty. What is sent, what is filled, or, for ``RECV_COMBINE``,
            the memory that ``combine`` writes (its numel and dtype are the message's).
        combine: for ``RECV_COMBINE`` only: called once with the peer's view, on the thread that moves the data.
    """

    kind: Kind
    peer: int
    step: int
    view: torch.Tensor
    combine: Callable[[torch.Tensor], None] | None = None

    @property
    def nbytes(self) -> int:
        return self.view.numel() * self.view.element_size()


@dataclass(frozen=True, slots=True)
class Header:
    """What all ranks must agree on before a collective can work; compared field by field on a mismatch.

    ``sequence`` counts the collectives of one communicator, rejected calls included. ``dtype`` names the types of all
    lanes, ``row_nbytes`` is what one element of ``shape`` has in all of them as it travels.
    """

    sequence: int
    collective: str
    algorithm: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    root: int
    slice_nbytes: int
    row_nbytes: int = 16
    version: int = 1

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields to tell a caller of; ``row_nbytes`` follows from ``dtype``."""
        return tuple(each.name for each in fields(cls) if each.name != "row_nbytes")

    @property
    def signature(self) -> tuple[Any, ...]:
        """All of it but the number: what calls of one kind have in common."""
        return (self.collective, self.algorithm, self.op, self.dtype, self.shape, self.root, self.slice_nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors, as they travel."""
        return math.prod(self.shape) * self.row_nbytes

    def differences(self, other: Header) -> list[tuple[str, Any, Any]]:
        """(field, own value, other's value) for each field that differs."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.names())
        return [(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


@dataclass(slots=True)
class Counters:
    """Running totals of one rank, counted as transfers are posted (bytes, messages) and exchanges finish.

    A replay of a captured collective counts what was counted as it was captured.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    steps: int = 0
    collectives: int = 0

    def count(self, transfer: Transfer) -> None:
        """Adds one posted transfer."""
        if transfer.kind is Kind.SEND:
            self.bytes_sent += transfer.nbytes
            self.messages_sent += 1
        else:
            self.bytes_received += transfer.nbytes
            self.messages_received += 1

    def reset(self) -> None:
        """Sets every counter to zero."""
        for each in fields(self):
            setattr(self, each.name, 0)

    def add(self, other: Counters) -> None:
        """Adds what ``other`` has counted."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def rewind(self, before: Counters) -> Counters:
        """Goes back to ``before``, a copy of this; returns what was counted since."""
        since = replace(self)
        for each in fields(self):
            setattr(since, each.name, getattr(self, each.name) - getattr(before, each.name))
            setattr(self, each.name, getattr(before, each.name))
        return since


class Exchange(ABC):
    """The transfers of one collective on one rank. Used by one thread at a time."""

    def run(self, task: Callable[[], None]) -> None:
        """Does ``task``, which posts, waits and finishes, on the thread that suits the transport, and returns after it.

        A transport whose waits cannot be interrupted does it on a thread of its own, so that the caller's can be.
        Raises what ``task`` raises, or what ended the collective in spite of it.
        """
        task()

    @abstractmethod
    def post(self, group: Sequence[Transfer]) -> Sequence[Event]:
        """Starts all transfers of ``group`` together and returns one event for each."""

    @abstractmethod
    def wait(self, events: Sequence[Event]) -> None:
        """Returns when all ``events`` are complete.

        Raises:
            CollectiveTimeoutError: the deadline passed; names this rank, the peer and the step.
            TransportError: a peer failed, or the ranks' headers do not fit (``MismatchError``).
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits for every posted transfer (sends too), then counts the steps and ends the collective.

        A collective that posted nothing (no elements) still meets the other ranks here and compares headers.
        """


class Transport(ABC):
    """One rank's connection to its peers. ``open`` to ``finish`` is one collective; one is open at a time.

    Attributes:
        rank, world_size: this rank and how many there are.
        fuses_combine: ``RECV_COMBINE`` is understood (the transport can read the peer's memory).
        stream_ordered: completion is an order on a device stream, not a fact on the host.
        device_types: where the tensors that it moves may be.
        counters: see ``Counters``.
    """

    name: str = "abstract"
    fuses_combine: bool = False
    stream_ordered: bool = False
    device_types: tuple[str, ...] = ("cpu",)

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()

    @abstractmethod
    def open(self, header: Header, deadline: float) -> Exchange:
        """Begins a collective. ``deadline`` is a ``time.monotonic()`` value.

        Raises:
            ClosedError: the transport was closed or aborted before; the text says why.
            TransportError: another rank has already failed in this collective.
        """

    @abstractmethod
    def reject(self, sequence: int, error: BaseException) -> None:
        """Publishes that this rank refused collective ``sequence`` (bad arguments), so that the others raise too.

        The transport stays usable if no other rank had entered that collective. Never raises.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Makes every rank's pending and later collectives raise, naming ``error``. From any thread, idempotent."""

    def synchronize(self, timeout: float | None = None) -> None:  # noqa: B027 - nothing is pending on a host transport
        """Blocks the host until every collective that was enqueued has ended.

        Raises:
            TimeoutError: ``timeout`` seconds passed; the collectives go on.
            TransportError: one failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of connections and threads. Idempotent; peers that still wait for this rank raise."""

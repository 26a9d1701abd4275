"""What the ranks of one transport tell each other through a store, beside the data: where they are, and what broke.

Keys, all under the transport's own prefix:

* ``status/<rank>``: the last collective that the rank entered, overwritten, so that the store does not grow.
* ``rejected/<sequence>``: the first refusal of that collective.
* ``failure``: the first failure; it is never replaced, so all ranks raise for the same reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from microddp.errors import ClosedError, CollectiveTimeoutError, MismatchError, RemoteError, TransportError
from microddp.transport.base import Header

__all__ = [
    "SETTLE_GRACE_S",
    "STORE_TIMEOUT_S",
    "Failure",
    "Noticeboard",
    "Status",
    "connection_lost",
    "describe_mismatch",
    "name_ranks",
]

POLL_S: Final = 0.01

STORE_TIMEOUT_S: Final = 1.0
"""How long anything waits for one answer of the store."""

SETTLE_GRACE_S: Final = 0.5
"""How long to wait for a better reason than a lost connection: a rank that ends its connections says why."""

_EXCEPTIONS: Final[dict[str, type[TransportError]]] = {
    "closed": TransportError,
    "lost": TransportError,
    "mismatch": MismatchError,
    "remote": RemoteError,
    "timeout": CollectiveTimeoutError,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a transport is broken: ``kind`` is a key of the table above, ``rank`` is the one that noticed."""

    kind: str
    rank: int
    text: str

    def exception(self, context: str) -> TransportError:
        """The error to raise on a rank that was doing ``context``."""
        return _EXCEPTIONS[self.kind](f"{context}: {self.text}")

    def closed_error(self, rank: int) -> ClosedError:
        """The error of every later use on ``rank``."""
        return ClosedError(f"rank {rank}: the transport cannot be used any more: {self.text}")


@dataclass(frozen=True, slots=True)
class Status:
    """Where one rank is: in or after collective ``sequence`` (-1: none yet)."""

    sequence: int = -1
    header: Header | None = None
    closed: bool = False


class Noticeboard:
    """Reads and writes the keys above. Used by one thread at a time; any call may raise if the store is gone."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store

    def set_status(self, status: Status) -> None:
        """Publishes this rank's status."""
        self._store.set(f"status/{self.rank}", json.dumps(asdict(status)))

    def statuses(self) -> list[Status]:
        """The status of every rank, by rank."""
        return [self.status(rank) for rank in range(self.world_size)]

    def status(self, rank: int) -> Status:
        """The status of ``rank``; before it has published one, that of a rank that has entered nothing."""
        text = self._find(f"status/{rank}")
        if text is None:
            return Status()
        found = json.loads(text)
        header = found["header"]
        if header is not None:
            header = Header(**{**header, "shape": tuple(header["shape"])})
        return Status(found["sequence"], header, found["closed"])

    def reject(self, sequence: int, failure: Failure) -> None:
        """Publishes that a rank refused collective ``sequence``; the first one stays."""
        self._store.compare_set(f"rejected/{sequence}", "", _encode(failure))

    def rejection(self, sequence: int) -> Failure | None:
        """The first refusal of collective ``sequence``."""
        return _decode(self._find(f"rejected/{sequence}"))

    def publish(self, failure: Failure) -> Failure:
        """Publishes ``failure`` if none is published yet; returns the published one."""
        return _decode(self._store.compare_set("failure", "", _encode(failure))) or failure

    def failure(self) -> Failure | None:
        """The published failure."""
        return _decode(self._find("failure"))

    def settle(self, suspicion: Failure, peer: int | None, grace_s: float) -> Failure:
        """The failure that all ranks agree on, given what this rank saw.

        For ``grace_s`` a better explanation than ``suspicion`` is looked for: a failure that another rank has
        published, or ``peer`` saying that it closed. Then ``suspicion`` is published.
        """
        deadline = time.monotonic() + grace_s
        while True:
            published = self.failure()
            if published is not None:
                return published
            if peer is not None and (status := self.status(peer)).closed:
                closed = Failure("closed", peer, f"rank {peer} closed its transport")
                # If it refused its last call, that is why it left.
                return self.publish(self.rejection(status.sequence) or closed)
            if time.monotonic() >= deadline:
                return self.publish(suspicion)
            time.sleep(POLL_S)

    def describe_absent(self, sequence: int) -> str:
        """Names the ranks that have not entered collective ``sequence``, as the end of a sentence."""
        absent = [rank for rank, status in enumerate(self.statuses()) if status.sequence < sequence]
        return f"; not known to have entered it: {name_ranks(absent)}" if absent else ""

    def _find(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        found: bytes = self._store.get(key)
        return found


def connection_lost(rank: int, peer: int | None) -> Failure:
    """What ``rank`` can say when it knows no more than that ``peer`` is gone."""
    text = f"rank {rank} lost its connection to rank {peer}, which exited, was killed or failed"
    return Failure("lost", rank, text)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 0, 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe_mismatch(headers: dict[int, Header]) -> str | None:
    """Which ranks disagree about which field, given the headers of one collective by rank; None if none do."""
    parts = []
    for name in Header.names():
        holders: dict[Any, list[int]] = {}
        for rank in sorted(headers):
            holders.setdefault(getattr(headers[rank], name), []).append(rank)
        if len(holders) > 1:
            values = (f"{value!r} on {name_ranks(ranks)}" for value, ranks in holders.items())
            parts.append(f"{name} is {', '.join(values)}")
    if not parts:
        return None
    sequence = next(iter(headers.values())).sequence
    return f"the ranks disagree about collective {sequence}: {'; '.join(parts)}"


def _encode(failure: Failure) -> str:
    return json.dumps(asdict(failure))


def _decode(text: bytes | None) -> Failure | None:
    return None if not text else Failure(**json.loads(text))

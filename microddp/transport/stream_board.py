"""What the ranks of a stream-ordered transport tell each other through a store: headers, and how far they are.

Transfers on a stream have no tags, and the host must not wait for the device. So headers are compared where they are
new, before anything is enqueued; where they are old, afterwards, by their digests. Keys, beside a noticeboard's:

* ``headers/<sequence>/<rank>``: what the rank called as collective ``sequence``, if somebody wants to know.
* ``asks`` and ``ask/<number>``: how often a sequence was asked for, and which.
* ``progress/<rank>``: overwritten several times a second: where the rank is, and that its process runs at all.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from microddp.transport.base import Header
from microddp.transport.noticeboard import Noticeboard

__all__ = ["History", "Progress", "StreamBoard"]

_REMEMBERED: Final = 1024
_RECENT: Final = 8
_MAX_KNOWN: Final = 65536


@dataclass(frozen=True, slots=True)
class Progress:
    """Where one rank is.

    Attributes:
        beat: goes up while the process runs.
        sequence: the last collective that it entered; -1: none yet.
        recent: (sequence, digest of all headers up to it) of the last few.
        doing, step: the collective that its device is in, and the step of it; None: idle.
        closed: it has left in good order.
    """

    beat: int = 0
    sequence: int = -1
    recent: tuple[tuple[int, int], ...] = ()
    doing: int | None = None
    step: int | None = None
    closed: bool = False


@dataclass(slots=True)
class History:
    """The collectives that this rank has entered. Written by one thread, read by others.

    Attributes:
        sequence: the last one.
        digest: of all headers so far.
    """

    sequence: int = -1
    digest: int = 0
    _known: OrderedDict[tuple[Any, ...], int] = field(default_factory=OrderedDict)
    _headers: OrderedDict[int, Header] = field(default_factory=OrderedDict)
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def is_known(self, header: Header) -> bool:
        """Whether a header like this, but for its number, was compared with all ranks before."""
        return header.signature in self._known

    def learn(self, header: Header) -> None:
        """The ranks agree about this header."""
        signature = header.signature
        self._known[signature] = zlib.crc32(repr(signature).encode())
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def enter(self, header: Header) -> None:
        """The rank enters a collective."""
        signature = header.signature
        known = self._known.get(signature)
        if known is None:
            known = zlib.crc32(repr(signature).encode())
        self.digest = zlib.crc32(known.to_bytes(4, "little"), self.digest)
        self._headers[header.sequence] = header
        self._recent.append((header.sequence, self.digest))
        self.sequence = header.sequence
        if len(self._headers) > _REMEMBERED:
            self._headers.popitem(last=False)

    def header(self, sequence: int) -> Header | None:
        """What was called as collective ``sequence``, if that is not too long ago."""
        return self._headers.get(sequence)

    def recent(self) -> tuple[tuple[int, int], ...]:
        """The last few (sequence, digest)."""
        return tuple(list(self._recent)[-_RECENT:])

    def disagreement(self, recent: tuple[tuple[int, int], ...]) -> int | None:
        """The first of another rank's (sequence, digest) that this rank's differs from."""
        own = dict(list(self._recent))
        return next((sequence for sequence, digest in recent if own.get(sequence, digest) != digest), None)


class StreamBoard(Noticeboard):
    """Reads and writes the keys above."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(store, rank, world_size)
        self._num_answered = 0
        self._wanted: set[int] = set()
        self._published: deque[int] = deque()

    def publish_header(self, header: Header) -> None:
        """Says what this rank calls as collective ``header.sequence``. Headers from before the last are deleted.

        All ranks have read those: each has read the last but one before it published the last.
        """
        self._store.set(self._key(header.sequence, self.rank), json.dumps(asdict(header)))
        if header.sequence not in self._published:
            self._published.append(header.sequence)
        while len(self._published) > 2:
            self._store.delete_key(self._key(self._published.popleft(), self.rank))

    def ask(self, sequence: int) -> None:
        """Asks the other ranks what they call as collective ``sequence``: their watchdogs answer by its header."""
        number = self._store.add("asks", 1)
        self._store.set(f"ask/{number}", str(sequence))

    def answer(self, history: History) -> None:
        """Answers what others have asked, as far as this rank has got."""
        count = self._store.add("asks", 0)
        while self._num_answered < count and self._store.check([f"ask/{self._num_answered + 1}"]):
            self._num_answered += 1
            self._wanted.add(int(self._store.get(f"ask/{self._num_answered}")))
        for sequence in sorted(self._wanted):
            header = history.header(sequence)
            if header is not None:
                self._store.set(self._key(sequence, self.rank), json.dumps(asdict(header)))
            if header is not None or sequence <= history.sequence:
                self._wanted.discard(sequence)

    def headers(self, sequence: int) -> dict[int, Header]:
        """What the ranks have said about collective ``sequence`` so far, by rank."""
        found = {}
        for rank in range(self.world_size):
            text = self._find(self._key(sequence, rank))
            if text is not None:
                fields = json.loads(text)
                found[rank] = Header(**{**fields, "shape": tuple(fields["shape"])})
        return found

    def has_all_headers(self, sequence: int) -> bool:
        """Whether all ranks have said what they call as collective ``sequence``."""
        return bool(self._store.check([self._key(sequence, rank) for rank in range(self.world_size)]))

    def set_progress(self, progress: Progress) -> None:
        """Publishes where this rank is."""
        self._store.set(f"progress/{self.rank}", json.dumps(asdict(progress)))

    def progress(self, rank: int) -> Progress:
        """Where ``rank`` is."""
        text = self._find(f"progress/{rank}")
        if text is None:
            return Progress()
        found = json.loads(text)
        return Progress(**{**found, "recent": tuple((sequence, digest) for sequence, digest in found["recent"])})

    @staticmethod
    def _key(sequence: int, rank: int) -> str:
        return f"headers/{sequence}/{rank}"

"""A stand-in's stand-in: ``cupy.cuda.nccl`` as one rank uses it, passed on and written down for the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Final

from tests.nccl.model_calls import Call, GroupEnd, GroupStart, Recv, Send

__all__ = ["NCCL_ITEMSIZES", "RecordingNccl"]

NCCL_ITEMSIZES: Final = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes of an element of ``ncclDataType_t`` 0, 1, 2 …"""


class RecordingNccl:
    """The names of module ``cupy.cuda.nccl``, over ``api`` (that module, or what takes its place).

    A group is written down when it is ended, as that is when it is issued, so that groups of several threads do not
    mix. What is passed on is written down before, so that a call that never returns is on record.

    Attributes:
        rank: whose calls these are.
        label: what the next transfers are written down with; whoever knows what is meant to travel sets it.
    """

    def __init__(self, api: Any, rank: int) -> None:
        self.api, self.rank = api, rank
        self.label: Hashable = None
        self._issued: list[Call] = []
        self._open: dict[int, list[Call]] = {}  # by thread: the calls of a group that has not ended
        self._depths: dict[int, int] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.api, name)

    @property
    def program(self) -> list[Call]:
        """The calls so far in the order in which they were issued; at the end those of groups that are still open."""
        with self._lock:
            return [*self._issued, *(call for calls in self._open.values() for call in calls)]

    def clear(self) -> None:
        """Forgets the calls of groups that have ended: those of a warm-up, say."""
        with self._lock:
            self._issued.clear()

    def NcclCommunicator(self, ndev: int, unique_id: Any, rank: int) -> _RecordingCommunicator:
        """See CuPy's."""
        return _RecordingCommunicator(self, self.api.NcclCommunicator(ndev, unique_id, rank))

    def groupStart(self) -> None:
        """See CuPy's."""
        self._note(GroupStart(), 1)
        self.api.groupStart()

    def groupEnd(self) -> None:
        """See CuPy's."""
        self._note(GroupEnd(), -1)
        self.api.groupEnd()

    def note(self, kind: Callable[..., Send | Recv], count: int, dtype: int, peer: int, stream: int) -> None:
        """Writes a transfer down."""
        self._note(kind(peer, count * NCCL_ITEMSIZES[dtype], stream, self.label), 0)

    def _note(self, call: Call, deeper: int) -> None:
        thread = threading.get_ident()
        with self._lock:
            depth = self._depths[thread] = max(self._depths.get(thread, 0) + deeper, 0)
            calls = self._open.setdefault(thread, [])
            calls.append(call)
            if not depth:
                self._issued += self._open.pop(thread)
                del self._depths[thread]


class _RecordingCommunicator:
    def __init__(self, recorder: RecordingNccl, inner: Any) -> None:
        self._recorder, self._inner = recorder, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._recorder.note(Send, count, datatype, peer, stream)
        self._inner.send(sendbuf, count, datatype, peer, stream)

    def recv(self, buf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._recorder.note(Recv, count, datatype, peer, stream)
        self._inner.recv(buf, count, datatype, peer, stream)

"""Calls to ``cupy.cuda.nccl`` that say which transfer of the plan they are, and those that are made to fail."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from microddp.plan.instructions import Recv, RecvCombine, Send
from microddp.transport.base import Transfer
from microddp.transport.nccl import NcclTransport
from microddp.transport.nccl_exchange import NcclExchange
from microddp.views import Views
from tests.nccl.model import judge
from tests.nccl.model_calls import Call, GroupEnd, GroupStart, Verdict
from tests.nccl.model_faults import FaultyNccl
from tests.nccl.model_recording import RecordingNccl

__all__ = ["Failing", "Meeting", "Recorders", "groups_of", "labelled_transfers"]

TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class LabelledTransfer(Transfer):
    """A transfer with its place in the plan: (step, slice, lane)."""

    label: Hashable = None


@contextmanager
def labelled_transfers() -> Iterator[None]:
    """Meanwhile the transport's calls go to ``Labelling`` with the step, slice and lane of what is meant to travel."""
    transfers_of, make_group, enqueue = Views.transfers, NcclTransport.group, NcclExchange.enqueue
    labels: dict[int, tuple[Any, list[Hashable]]] = {}  # the group too, so that no other takes its identity

    def transfers(views: Views, instruction: Send | Recv | RecvCombine) -> Iterator[Transfer]:
        for lane, each in enumerate(transfers_of(views, instruction)):
            label = (instruction.step, instruction.slice, lane)
            yield LabelledTransfer(each.kind, each.peer, each.step, each.view, each.combine, label)

    def make_labelled_group(transport: NcclTransport, group: Sequence[Transfer]) -> Any:
        made = make_group(transport, group)
        labels[id(made)] = made, [getattr(each, "label", None) for each in group]
        return made

    def enqueue_labelled(exchange: NcclExchange, group: Any) -> None:
        exchange._transport.api.coming = deque(labels[id(group)][1])
        enqueue(exchange, group)

    with contextlib.ExitStack() as patches:
        for place, name, new in (
            (Views, "transfers", transfers),
            (NcclTransport, "group", make_labelled_group),
            (NcclExchange, "enqueue", enqueue_labelled),
        ):
            patches.enter_context(mock.patch.object(place, name, new))
        yield


class Labelling:
    """In front of a recorder or fault: sets its ``label`` before each transfer, to what ``coming`` holds."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.coming: deque[Hashable] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def NcclCommunicator(self, ndev: int, unique_id: Any, rank: int) -> Any:
        return _LabellingCommunicator(self, self.inner.NcclCommunicator(ndev, unique_id, rank))

    def next_label(self) -> None:
        self.inner.label = self.coming.popleft() if self.coming else None


class _LabellingCommunicator:
    def __init__(self, labelling: Labelling, inner: Any) -> None:
        self._labelling, self._inner = labelling, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, *arguments: Any) -> None:
        self._labelling.next_label()
        self._inner.send(*arguments)

    def recv(self, *arguments: Any) -> None:
        self._labelling.next_label()
        self._inner.recv(*arguments)


class Recorders:
    """The recorders of all ranks, and what stands between them and the transports.

    Attributes:
        faults: by rank.
    """

    def __init__(self, world_size: int, fault: Callable[[Any, int], Any] = lambda recorder, rank: recorder) -> None:
        """``fault``: of a recorder and its rank, what to put in front of it."""
        from cupy.cuda import nccl

        self.each = [RecordingNccl(nccl, rank) for rank in range(world_size)]
        self.faults = [fault(recorder, rank) for rank, recorder in enumerate(self.each)]
        self._apis = [Labelling(each) for each in self.faults]

    def api(self, rank: int) -> Labelling:
        """What the transport of ``rank`` gets."""
        return self._apis[rank]

    def arm(self, rank: int) -> None:
        """Forgets what ``rank`` has called so far; its fault counts from here."""
        self.each[rank].clear()
        if isinstance(self.faults[rank], FaultyNccl):
            self.faults[rank].arm()

    @property
    def programs(self) -> list[list[Call]]:
        return [each.program for each in self.each]

    def verdict(self) -> Verdict:
        return judge(self.programs)


class Meeting(threading.Barrier):
    """All ranks, as often as they like."""

    def __call__(self) -> None:
        self.wait(TIMEOUT_S)


class Failing(FaultyNccl):
    """Send ``number`` raises ``error``; with ``at_end`` the end of its group does, or both if ``error`` is NCCL's.

    Attributes:
        starts, ends: groups that were begun and ended, counted whatever happens.
    """

    def __init__(self, inner: Any, number: int, error: Callable[[], Exception], *, at_end: bool = False) -> None:
        super().__init__(inner, number, armed=False)
        self.starts = self.ends = 0
        self._error, self._at_end, self._sends = error, at_end, -1
        self._pending = False

    def on_start(self) -> None:
        self.starts += 1
        super().on_start()

    def on_end(self) -> None:
        self.ends += 1
        super().on_end()
        if self._pending:
            self._pending = False
            raise self._error()

    def on_transfer(self, communicator: Any, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "send" and self.armed:
            self._sends += 1
            if self._sends == self.number:
                self.struck = True
                self._pending = self._at_end
                if not self._at_end:
                    raise self._error()
        super().on_transfer(communicator, name, arguments)


def groups_of(program: Sequence[Call]) -> list[list[Call]]:
    """The transfers of each group; raises AssertionError unless the program is nothing but groups, none nested."""
    groups: list[list[Call]] = []
    is_open = False
    for call in program:
        if isinstance(call, (GroupStart, GroupEnd)):
            assert is_open is isinstance(call, GroupEnd), program
            is_open = not is_open
            if is_open:
                groups.append([])
        else:
            assert is_open, program
            groups[-1].append(call)
    assert not is_open
    return groups

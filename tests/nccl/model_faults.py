"""Faults between a transport and ``cupy.cuda.nccl``: a step that is not grouped, swapped groups, wrong peer or size.

Each wraps the api (best a ``RecordingNccl``, so that the model sees what was really issued) and has its names. Nothing
is counted before ``arm()`` unless it is armed from the start: warming up must be able to pass unharmed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FaultyNccl", "SwappedGroups", "UngroupedStep", "WrongCount", "WrongPeer"]


class FaultyNccl:
    """Passes everything on; subclasses change the ``number``-th (from 0) of what they are about.

    Attributes:
        struck: whether the fault has happened.
    """

    def __init__(self, inner: Any, number: int = 0, *, armed: bool = True) -> None:
        self.inner, self.number, self.armed = inner, number, armed
        self.struck = False
        self._depth = 0
        self._groups = -1  # the number of the group that is open, or was last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def label(self) -> Any:
        """As in ``RecordingNccl``."""
        return self.inner.label

    @label.setter
    def label(self, label: Any) -> None:
        self.inner.label = label

    def arm(self) -> None:
        """Counts from here."""
        self.armed = True

    def NcclCommunicator(self, ndev: int, unique_id: Any, rank: int) -> _FaultyCommunicator:
        return _FaultyCommunicator(self, self.inner.NcclCommunicator(ndev, unique_id, rank), ndev, rank)

    def groupStart(self) -> None:
        self._depth += 1
        if self._depth == 1 and self.armed:
            self._groups += 1
        self.on_start()

    def groupEnd(self) -> None:
        self._depth -= 1
        self.on_end()

    def on_start(self) -> None:
        self.inner.groupStart()

    def on_end(self) -> None:
        self.inner.groupEnd()

    def on_transfer(self, communicator: _FaultyCommunicator, name: str, arguments: tuple[Any, ...]) -> None:
        getattr(communicator.inner, name)(*arguments)


class _FaultyCommunicator:
    def __init__(self, faulty: FaultyNccl, inner: Any, world_size: int, rank: int) -> None:
        self._faulty, self.inner, self.world_size, self.rank = faulty, inner, world_size, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, *arguments: Any) -> None:
        self._faulty.on_transfer(self, "send", arguments)

    def recv(self, *arguments: Any) -> None:
        self._faulty.on_transfer(self, "recv", arguments)


class UngroupedStep(FaultyNccl):
    """Group ``number`` loses its start and its end."""

    def on_start(self) -> None:
        if self._is_it:
            self.struck = True
        else:
            super().on_start()

    def on_end(self) -> None:
        if not self._is_it:
            super().on_end()

    @property
    def _is_it(self) -> bool:
        return self.armed and self._groups == self.number


class SwappedGroups(FaultyNccl):
    """Group ``number`` is issued after the one that follows it. Each keeps its labels."""

    def __init__(self, inner: Any, number: int = 0, *, armed: bool = True) -> None:
        super().__init__(inner, number, armed=armed)
        self._held: list[Callable[[], None]] = []

    def on_start(self) -> None:
        self._do(self.inner.groupStart)

    def on_transfer(self, communicator: _FaultyCommunicator, name: str, arguments: tuple[Any, ...]) -> None:
        label = getattr(self.inner, "label", None)

        def issue() -> None:
            self.inner.label = label
            getattr(communicator.inner, name)(*arguments)

        self._do(issue)

    def on_end(self) -> None:
        self._do(self.inner.groupEnd)
        if self._held and not self._depth and self._groups > self.number:
            self.flush()
            self.struck = True

    def flush(self) -> None:
        """Issues what is held: if no other group follows, a test has to ask for it."""
        held, self._held = self._held, []
        for issue in held:
            issue()

    def _do(self, issue: Callable[[], None]) -> None:
        if self.armed and self._groups == self.number:
            self._held.append(issue)
        else:
            issue()


class _FaultyTransfer(FaultyNccl):
    """Changes the arguments of send ``number``."""

    def __init__(self, inner: Any, number: int = 0, *, armed: bool = True) -> None:
        super().__init__(inner, number, armed=armed)
        self._sends = -1

    def on_transfer(self, communicator: _FaultyCommunicator, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "send" and self.armed:
            self._sends += 1
            if self._sends >= self.number and not self.struck:
                changed = self.changed(communicator, *arguments)
                self.struck = changed != arguments
                arguments = changed
        super().on_transfer(communicator, name, arguments)

    def changed(self, communicator: _FaultyCommunicator, *arguments: Any) -> tuple[Any, ...]:
        raise NotImplementedError


class WrongPeer(_FaultyTransfer):
    """Send ``number`` goes to the next rank after its peer that is not the sender (with two ranks: the sender)."""

    def changed(self, communicator: _FaultyCommunicator, *arguments: Any) -> tuple[Any, ...]:
        pointer, count, dtype, peer, stream = arguments
        others = [(peer + step) % communicator.world_size for step in range(1, communicator.world_size)]
        wrong = next((each for each in others if each != communicator.rank), communicator.rank)
        return pointer, count, dtype, wrong, stream


class WrongCount(_FaultyTransfer):
    """Send ``number``, or the first after it that has more than one element, sends only half of its elements."""

    def changed(self, communicator: _FaultyCommunicator, *arguments: Any) -> tuple[Any, ...]:
        pointer, count, dtype, peer, stream = arguments
        return pointer, count // 2 or count, dtype, peer, stream

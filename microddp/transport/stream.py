"""The contract of transports whose transfers are enqueued on a stream of a device, beside that of all transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from microddp.device import DeviceRuntime
from microddp.errors import TransportError
from microddp.transport.base import Exchange, Header, Transfer, Transport

__all__ = ["NotCapturableError", "StreamExchange", "StreamTransport", "Ticket"]


class NotCapturableError(TransportError):
    """A collective cannot be captured into a graph, or not yet; nothing has happened."""


class Ticket(ABC):
    """A collective whose work is enqueued on a device: what its caller can still ask and wait for."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""

    def release(self) -> None:  # noqa: B027
        """Nothing needs to be kept for it any more: see ``DeviceRuntime.frees_in_order``."""

    @abstractmethod
    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host until it has ended.

        Raises:
            TimeoutError: ``timeout`` seconds passed; the collective goes on.
            TransportError: it failed, on whichever rank; the text says which ranks and which step.
        """


class StreamExchange(Exchange):
    """One collective of a stream-ordered transport: its transfers are enqueued, and nobody waits on the host.

    Either ``enqueue`` and ``submit`` are called, or, as on any transport, ``post``, ``wait`` and ``finish``, which
    block the host.
    """

    @abstractmethod
    def enqueue(self, group: Any) -> None:
        """Enqueues transfers, or what ``StreamTransport.group`` made of them, as one group on ``groups``."""

    @abstractmethod
    def submit(self, done: Any, kept: object) -> Ticket:
        """Ends the collective on the host: all of it is enqueued, and ``done``, a recorded event, marks its end.

        ``kept`` is held until then: the tensors whose memory the device still uses.
        """


class StreamTransport(Transport):
    """A transport whose transfers are enqueued on a stream of a device.

    Attributes:
        runtime: the device's streams and events.
        groups: the stream of the transfers. Those of one transport run in the order in which they are enqueued.
        kernels: the stream of what combines and copies.
    """

    stream_ordered = True
    runtime: DeviceRuntime
    groups: Any
    kernels: Any

    @abstractmethod
    def open(self, header: Header, deadline: float) -> StreamExchange:
        """See ``Transport.open``.

        The host may block here when a header is new: it is compared with the other ranks' then."""

    def open_captured(self, header: Header) -> StreamExchange:
        """Begins a collective that is captured into a graph: nothing runs now, so nothing is watched or waited for.

        Raises:
            NotCapturableError: it cannot be, or was never run before (its peers may not be connected yet).
        """
        raise NotCapturableError(f"the {self.name} transport cannot be captured into graphs")

    def group(self, transfers: Sequence[Transfer]) -> Any:
        """What is to be enqueued again and again, checked and worked out once. May not keep the tensors."""
        return transfers

    @abstractmethod
    def prepare(self, edges: Sequence[tuple[int, bool]], deadline: float) -> None:
        """Connects this rank with the peers of a plan, (peer, is a send) each, before its first use. Blocks the host.

        Raises:
            TransportError: a peer did not come, or failed.
        """

"""One collective over NCCL: its groups are enqueued on a stream; what was enqueued can be watched and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from microddp.errors import ClosedError, TransportError
from microddp.transport.base import Header, Transfer
from microddp.transport.nccl_api import describe_nccl_error
from microddp.transport.nccl_group import PreparedGroup
from microddp.transport.nccl_setup import explanation
from microddp.transport.stream import StreamExchange, Ticket

if TYPE_CHECKING:
    from microddp.transport.nccl import NcclTransport

__all__ = ["Flight", "NcclExchange"]

_SPINS: Final = 200
_POLL_S: Final = 0.0005
_ABORT_S: Final = 1.0
"""How long a failure waits for the device to have stopped: then the caller may free the tensors."""

_ending = threading.Lock()  # a caller and the watchdog may find out at the same time

Mark = tuple[object, int, Any]
"""(a text for people, the step, an event behind it): not the transfers, which would keep the tensors."""


class Flight(Ticket):
    """A collective that was enqueued, until the device has ended it.

    Attributes:
        header, deadline: of the collective.
        since: when it was enqueued (``time.monotonic()``).
    """

    def __init__(
        self,
        transport: NcclTransport,
        header: Header,
        deadline: float,
        marks: list[Mark],
        done: Any,
        kept: object,
    ) -> None:
        self.header, self.deadline = header, deadline
        self.since = time.monotonic()
        self._transport, self._marks = transport, marks
        self._event, self._kept = done, kept
        self._outcome: bool | None = None  # whether it ended well; None: not known yet
        self._what = ""  # it, and how far it was as it failed

    @property
    def ended_well(self) -> bool:
        """Whether it is known to have ended, and not to have failed."""
        return self._outcome is True

    def done(self) -> bool:
        """See ``Ticket.done``."""
        try:
            return self.poll()
        except Exception:  # the watchdog polls too, and finds out what it means for all ranks
            return False

    def poll(self) -> bool:
        """Like ``done``; raises what the device raises."""
        if self._outcome is None:
            # In this order: after a failure the device is told to stop, and then its events complete too.
            if self._transport.failure is not None:
                self._what = self.describe()
                self._outcome = False
            elif self._transport.runtime.query(self._event) and self._transport.check_device():
                self.end(well=True)
        return self._outcome is not None

    def end(self, *, well: bool) -> None:
        """Lets go of the tensors: the device is done with them, or has been made to stop."""
        with _ending:
            if self._outcome is None:
                self._outcome = well
            self._kept = None
            marks, self._marks = self._marks, []
        self._transport.recycle([event for _, _, event in marks])

    def release(self) -> None:
        """See ``Ticket.release``."""
        self._kept = None

    def synchronize(self, timeout: float | None = None) -> None:
        """See ``Ticket.synchronize``. Polls; the transport's threads look at everything else that can go wrong."""
        until = None if timeout is None else time.monotonic() + timeout
        spins = 0
        while not self.done():
            spins += 1
            if spins > _SPINS:
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"{self.describe()} has not ended after {timeout:.3g} s; it goes on")
                time.sleep(_POLL_S)
        failure = self._transport.failure
        if not self._outcome and failure is not None:
            self._transport.watchdog.wait_for_abort(_ABORT_S)
            raise failure.exception(self._what or self.describe())

    @property
    def step(self) -> int | None:
        """The schedule's step that the device is in; None if its transfers are complete."""
        mark = self._mark()
        return mark[1] if mark else None

    def describe(self) -> str:
        """What it is, and how far."""
        header, transport = self.header, self._transport
        text = f"rank {transport.rank} of {transport.world_size}: {header.collective} by {header.algorithm}, "
        text += f"collective {header.sequence}"
        mark = self._mark()
        return f"{text}, {mark[0]}" if mark else text

    def _mark(self) -> Mark | None:
        """The first step that is not complete, by its last group."""
        query = self._transport.runtime.query
        try:
            return next((mark for mark in list(self._marks) if not query(mark[2])), None)
        except RuntimeError:
            return None  # the device has failed


class NcclExchange(StreamExchange):
    """The transfers of one collective.

    Attributes:
        header, deadline: of the collective.
    """

    def __init__(self, transport: NcclTransport, header: Header, deadline: float, *, is_captured: bool = False) -> None:
        self.header = header
        self.deadline = deadline
        self._transport, self._is_captured = transport, is_captured
        self._marks: list[Mark] = []
        self._step = -1
        self._steps: set[int] = set()
        self._tickets: list[Flight] = []
        transport.watchdog.start()

    def enqueue(self, group: Sequence[Transfer] | PreparedGroup) -> None:
        """See ``StreamExchange.enqueue``. Marks the end of each step, so that it can be told where a peer is missing.

        Raises:
            ValueError: a transfer that NCCL cannot do.
            TransportError: NCCL refused it, or the communicator was aborted.
        """
        transport = self._transport
        group = transport.group(group) if not isinstance(group, PreparedGroup) else group
        if transport.failure is not None:
            raise transport.failure.exception(self._context(group))
        try:
            with transport.calling:
                group.enqueue(transport.api, transport.comm, transport.groups_handle)
        except Exception as error:
            raise self._translated(error, group) from error
        group.count(transport.counters)
        self._mark(group)

    def submit(self, done: Any, kept: object) -> Flight:
        """See ``StreamExchange.submit``."""
        transport = self._transport
        self._leave()
        flight = Flight(transport, self.header, self.deadline, self._marks, done, kept)
        if self._is_captured:
            flight.end(well=True)
        else:
            transport.watchdog.add(flight)
        return flight

    def post(self, group: Sequence[Transfer]) -> list[Flight]:
        """See ``Exchange.post``."""
        if not group:
            return []
        prepared = self._transport.group(group)
        self._connect(prepared)
        self.enqueue(prepared)
        runtime = self._transport.runtime
        event = runtime.new_event()
        runtime.record(event, self._transport.groups)
        flight = Flight(
            self._transport, self.header, self.deadline, [(str(prepared), prepared.step, event)], event, group
        )
        self._transport.watchdog.add(flight)
        self._tickets.append(flight)
        return [flight] * len(group)

    def wait(self, events: Sequence[Flight]) -> None:
        """See ``Exchange.wait``. Blocks the host."""
        for flight in events:
            flight.synchronize()

    def finish(self) -> None:
        """See ``Exchange.finish``. Blocks the host; without transfers it meets the other ranks in the store."""
        self.wait(self._tickets)
        if not self._tickets and self._transport.world_size > 1:
            self._transport.meet(self.header, self.deadline)
        self._leave()

    def _connect(self, group: PreparedGroup) -> None:
        """Here, where it has a deadline: NCCL would do so within the group, for ever if a peer does not come."""
        try:
            self._transport.prepare([(peer, is_send) for is_send, _, _, peer in group.calls], self.deadline)
        except TransportError as error:
            error.args = (f"{self._context(group)}: {error}",)
            raise

    def _leave(self) -> None:
        transport = self._transport
        transport.open_exchange = None
        transport.counters.steps += len(self._steps)
        transport.counters.collectives += 1

    def _mark(self, group: PreparedGroup) -> None:
        step = group.step
        self._steps.add(step)
        if self._is_captured:
            return
        transport = self._transport
        if step == self._step:
            _, _, event = self._marks.pop()
        else:
            event = transport.take_event()
        transport.runtime.record(event, transport.groups)
        self._marks.append((group.text, step, event))
        self._step = step

    def _translated(self, error: Exception, group: PreparedGroup) -> Exception:
        """The error to raise after one of NCCL's: if the communicator was aborted meanwhile, the reason for that."""
        transport, text = self._transport, describe_nccl_error(error)
        if transport.closed:
            return ClosedError(f"{self._context(group)}: the transport was closed meanwhile")
        if text is None and transport.failure is None:
            return error
        # What was enqueued before may have failed, and NCCL says so only now.
        failure = explanation(lambda: transport.failure)
        if failure is not None:
            return failure.exception(self._context(group))
        return TransportError(f"{self._context(group)}: {text}")

    def _context(self, group: PreparedGroup) -> str:
        transport, header = self._transport, self.header
        call = f"{header.collective} by {header.algorithm}, collective {header.sequence}"
        return f"rank {transport.rank} of {transport.world_size}: {call}, {group}"

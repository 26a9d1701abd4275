"""What a communicator is apart from its collectives: who it is, what it has done, how it begins and ends."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TypeVar

from microddp.calls import Calls
from microddp.collectives import Collectives
from microddp.planner import Choice, Planner
from microddp.transport.base import Counters, Transport

__all__ = ["DEFAULT_TIMEOUT_S", "Lifecycle"]

DEFAULT_TIMEOUT_S = 300.0

Own = TypeVar("Own", bound="Lifecycle")


class Lifecycle:
    """One rank's end of collectives, without the collectives."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        slice_nbytes: int | None = None,
        num_slots: int | None = None,
        launcher: str | None = None,
    ) -> None:
        """Takes over ``transport`` and closes it at the end.

        Args:
            timeout: seconds that one collective may take.
            slice_nbytes, num_slots: how large the pieces of a chunk are and between how many staging buffers they
                alternate; None: chosen by size. The same on all ranks.
            launcher: what combines, "eager", "interpreter" or "compiled"; None: chosen by device.

        Raises:
            ValueError: ``timeout``, ``slice_nbytes`` or ``num_slots`` make no sense.
        """
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
        self._transport = transport
        self._planner = Planner(transport, slice_nbytes=slice_nbytes, num_slots=num_slots, launcher=launcher)
        self._collectives = Collectives(transport, self._planner)
        self._calls = Calls(transport, timeout)
        self._finalizer = weakref.finalize(self, self._calls.close)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._transport.world_size

    @property
    def transport_name(self) -> str:
        """What moves the bytes: "thread", "gloo" …"""
        return self._transport.name

    @property
    def counters(self) -> Counters:
        """What was sent and received so far; ``counters.reset()`` sets it to zero."""
        return self._transport.counters

    @property
    def last_choice(self) -> Choice | None:
        """What the last collective ran with: the algorithm that ``algorithm=None`` chose, slices, transport."""
        return self._calls.last_choice

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory held now."""
        return self._planner.pool.nbytes

    @property
    def timeout(self) -> float:
        """Seconds that one collective may take; may be set."""
        return self._calls.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {seconds}")
        self._calls.timeout = seconds

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._calls.run("barrier", self._collectives.barrier, False)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host until everything called so far has ended, on a GPU too, and raises what made it fail.

        Raises:
            TimeoutError: ``timeout`` seconds passed; the collectives go on.
            TransportError: one failed, here or on another rank.
        """
        self._calls.synchronize(timeout)

    def close(self) -> None:
        """Lets go of connections, threads and memory. Idempotent.

        Works that are pending are given a moment to end, then aborted: their ``wait()`` raises, on all ranks.
        """
        self._finalizer()
        self._planner.clear()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._calls.abort(error)  # so that no other rank waits for this one
        self.close()

    def __repr__(self) -> str:
        state = "" if self._calls.is_usable else ", closed"
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size} over {self.transport_name}{state}>"

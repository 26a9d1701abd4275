"""The errors of microddp: arguments raise ValueError or TypeError, everything else one of these."""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "CollectiveTimeoutError",
    "MicroddpError",
    "MismatchError",
    "PlanError",
    "RemoteError",
    "ScheduleError",
    "TransportError",
]


class MicroddpError(Exception):
    """Base class of every error that is not about one argument of one call."""


class ScheduleError(MicroddpError):
    """A schedule failed its proof: a missing or repeated contribution, an unmatched transfer, a deadlock."""


class PlanError(MicroddpError):
    """A plan is not a faithful, race-free lowering of its schedule."""


class TransportError(MicroddpError):
    """Data could not be moved: a peer died, a connection closed, a rendezvous failed."""


class MismatchError(TransportError):
    """Two ranks called collectives that do not fit together; the text names both ranks and both values."""


class CollectiveTimeoutError(TransportError, TimeoutError):
    """A collective did not finish before its deadline; the text names the rank, the awaited peer and the step."""


class RemoteError(TransportError):
    """Another rank raised; the text carries its rank and its traceback."""


class ClosedError(MicroddpError):
    """The communicator was closed, or broken by an earlier failure that the text names."""

"""How a world of rank threads fails: one failure, told to every rank in that rank's own words."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from microddp.errors import ClosedError, MismatchError, RemoteError, TransportError
from microddp.transport.base import Header

__all__ = ["Failure", "call_text", "header_mismatch", "remote_failure"]


@dataclass(slots=True)
class Failure:
    """Why a world can no longer be used.

    Attributes:
        kind: what the ranks raise, once each; ``origin`` raises ``cause`` itself, if it has not done so.
        reason: what happened, and on which rank.
        origin: the rank where it happened, or None if it is no one rank's doing.
        cause: the original exception.
        told: the ranks that have raised it; what they call later is refused with ``ClosedError``.
    """

    kind: type[TransportError]
    reason: str
    origin: int | None = None
    cause: BaseException | None = None
    told: set[int] = field(default_factory=set)

    def error_for(self, rank: int, where: str) -> BaseException:
        """What ``rank`` raises now, while doing what ``where`` says."""
        error: BaseException
        if rank in self.told:
            error = ClosedError(f"rank {rank}, {where}: closed by an earlier failure: {self.reason}")
        elif rank == self.origin and self.cause is not None:
            self.told.add(rank)
            return self.cause
        else:
            self.told.add(rank)
            error = self.kind(f"rank {rank}, {where}: {self.reason}")
        error.__cause__ = self.cause
        return error


def remote_failure(origin: int | None, error: BaseException, what: str = "raised") -> Failure:
    """The failure of a world in which rank ``origin`` (None: whoever owns the world) met ``error``."""
    who = "the owner of the world" if origin is None else f"rank {origin}"
    told = set() if origin is None else {origin}
    # A traceback is worth its lines only where the error was raised; then its last line names the error again.
    trace = "\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    reason = f"{who} {what} {type(error).__name__}: {error}{trace if error.__traceback__ else ''}"
    return Failure(RemoteError, reason, origin, error, told)


def call_text(header: Header) -> str:
    """Names a collective in error texts."""
    return f"{header.collective}/{header.algorithm} (collective {header.sequence})"


def header_mismatch(rank: int, mine: Header, other: int, theirs: Header) -> Failure:
    """The failure of a world in which two ranks' headers differ; the text names each field and both values."""
    texts = [
        f"rank {rank} called {mine.collective} with {name} {value}, rank {other} with {other_value}"
        for name, value, other_value in mine.differences(theirs)
    ]
    return Failure(MismatchError, "; ".join(texts))

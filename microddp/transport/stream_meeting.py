"""All ranks of a stream-ordered transport meet on the host, in the store: before something new, and in a barrier."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from microddp.transport.base import Header
from microddp.transport.noticeboard import STORE_TIMEOUT_S, Failure, describe_mismatch
from microddp.transport.store_thread import StoreThread
from microddp.transport.stream_reports import DESCRIBE_S, SILENT_STORE, StreamReports

__all__ = ["meet_ranks"]

_ASK_AFTER_S: Final = 0.02
_FIRST_POLL_S: Final = 0.0005
_LONGEST_POLL_S: Final = 0.02
_REASON_GRACE_S: Final = 0.5
"""How long a store that is gone waits for a better explanation: the lifeline tells which rank died with it."""


def meet_ranks(
    store: StoreThread, reports: StreamReports, header: Header, deadline: float, stop: Callable[[], Failure | None]
) -> Failure | None:
    """Waits until all ranks have said what they call as collective ``header.sequence``.

    Args:
        deadline: in ``time.monotonic()`` seconds.
        stop: asked again and again: a failure that makes waiting pointless.

    Returns:
        Why the ranks cannot go on with this collective; None if all agree.
    """
    rank = reports.board.rank
    store.call(lambda: reports.board.publish_header(header), STORE_TIMEOUT_S)
    begun, delay, has_asked = time.monotonic(), _FIRST_POLL_S, False
    while True:
        failure = stop()
        if failure is not None:
            return failure
        now = time.monotonic()
        ask = not has_asked and now - begun >= _ASK_AFTER_S
        has_asked = has_asked or ask
        found = store.call(_look(reports, header, ask), STORE_TIMEOUT_S)
        if found:
            text = describe_mismatch(found)
            if text is not None:
                return Failure("mismatch", rank, text)
            reports.history.learn(header)
            return None
        if has_asked:
            refusal = store.call(lambda: reports.refusal(header.sequence), STORE_TIMEOUT_S)
            if isinstance(refusal, Failure):
                return refusal
        if store.is_gone:
            return _explained(stop) or Failure("lost", rank, f"rank {rank} lost its connection to the store")
        if now >= deadline:
            return stop() or _nobody_came(store, reports, header)
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_POLL_S)


def _look(reports: StreamReports, header: Header, ask: bool) -> Callable[[], dict[int, Header] | None]:
    return lambda: reports.meet(header, ask)


def _explained(stop: Callable[[], Failure | None]) -> Failure | None:
    until = time.monotonic() + _REASON_GRACE_S
    while time.monotonic() < until:
        failure = stop()
        if failure is not None:
            return failure
        time.sleep(_LONGEST_POLL_S)
    return None


def _nobody_came(store: StoreThread, reports: StreamReports, header: Header) -> Failure:
    rank = reports.board.rank
    missing = store.call(lambda: reports.describe_missing(header), DESCRIBE_S)
    text = f"the deadline passed on rank {rank}, waiting for all ranks to enter it"
    return Failure("timeout", rank, text + (SILENT_STORE if missing is None else missing))

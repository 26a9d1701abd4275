"""What a stream-ordered transport learns from the store, and puts there; all of it on the store's own thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from microddp.transport.base import Header
from microddp.transport.noticeboard import Failure, describe_mismatch, name_ranks
from microddp.transport.stream_board import History, Progress, StreamBoard

if TYPE_CHECKING:
    from microddp.transport.nccl_exchange import Flight

__all__ = ["DESCRIBE_S", "SILENT_STORE", "StreamReports"]

DESCRIBE_S: Final = 1.5
"""How long ``describe_missing`` may take."""

SILENT_STORE: Final = "; the store does not answer: its host may be stopped"
"""What stands in for it if the store is not there."""

BUSY_S: Final = 0.1
IDLE_S: Final = 0.25
_LOOKED_AT: Final = 8
_SILENCE_S: Final = 0.7
"""A rank that publishes nothing for so long, while it should, does not run."""

_PLURALS: Final = {"is": "are", "has": "have", "does": "do"}


class StreamReports:
    """One rank's side of the board.

    Attributes:
        board: the keys.
        history: what this rank has called; written by the caller's thread.
        is_alarmed: something is wrong with the oldest collective, so that its header is compared at once.
    """

    def __init__(self, board: StreamBoard, period: float) -> None:
        """``period``: a collective that takes longer, in seconds, has its header compared with all ranks'."""
        self.board, self.history = board, History()
        self.is_alarmed = False
        self._period = period
        self._progress = Progress()
        self._last: Flight | None = None
        self._asked = -1  # the last sequence that this rank asked for because it was stuck

    def tick(self, flights: Sequence[Flight]) -> tuple[Failure | None, float]:
        """Does what is due; returns a failure, if there is one, and after how many seconds to come again.

        Args:
            flights: the collectives that are not known to have ended, in order.
        """
        board, flight = self.board, flights[0] if flights else None
        board.answer(self.history)
        self._publish(flight)
        # Not of the first only: NCCL's error in a later one can keep it from being known to have ended.
        refusals = (board.rejection(each.header.sequence) for each in flights[:_LOOKED_AT])
        failure = board.failure() or next(filter(None, refusals), None)
        return failure or self._compare(flight), IDLE_S if flight is None else BUSY_S

    def close(self) -> None:
        """Says that this rank leaves in good order."""
        self.board.set_progress(Progress(self._progress.beat + 1, self.history.sequence, closed=True))

    def describe_missing(self, header: Header) -> str:
        """Which ranks are where in collective ``header.sequence``, and which do not run, as the end of a sentence.

        Looks twice, so it takes most of a second.
        """
        board, me = self.board, self.board.rank
        others = [rank for rank in range(board.world_size) if rank != me]
        before = {rank: board.progress(rank) for rank in others}
        until = time.monotonic() + _SILENCE_S
        while time.monotonic() < until:
            if board.failure() is not None:
                return ""  # another rank was faster
            self._publish(self._last)  # the others may be asking the same of this one
            time.sleep(BUSY_S)  # a silence has no end that could be waited for
        after = {rank: board.progress(rank) for rank in others}
        groups: dict[str, list[int]] = {}
        for rank in others:
            groups.setdefault(_describe(before[rank], after[rank], header.sequence), []).append(rank)
        texts = [
            f"{name_ranks(ranks)} {_plural(text) if ranks[1:] else text}" for text, ranks in sorted(groups.items())
        ]
        return "".join(f"; {text}" for text in texts)

    def meet(self, header: Header, ask: bool) -> dict[int, Header] | None:
        """One look at whether all ranks have said what they call as this collective: their headers, or None.

        Args:
            ask: ask those that do not say so by themselves.
        """
        if ask:
            self.board.ask(header.sequence)
        if not self.board.has_all_headers(header.sequence):
            return None
        return self.board.headers(header.sequence)

    def _publish(self, flight: Flight | None) -> None:
        history, self._last = self.history, flight
        doing = None if flight is None else flight.header.sequence
        step = None if flight is None else flight.step
        self._progress = Progress(self._progress.beat + 1, history.sequence, history.recent(), doing, step)
        self.board.set_progress(self._progress)

    def refusal(self, sequence: int) -> Failure | None:
        """Why a rank will never come to collective ``sequence``: it refused its arguments, or has left."""
        return self.board.rejection(sequence) or self._departed(sequence)

    def _compare(self, flight: Flight | None) -> Failure | None:
        """Looks at the neighbour's headers, by their digests; at all ranks' once a collective takes long."""
        board = self.board
        neighbour = board.progress((board.rank - 1) % board.world_size)
        differs = self.history.disagreement(neighbour.recent)
        is_stuck = flight is not None and (self.is_alarmed or time.monotonic() - flight.since >= self._period)
        failure = None
        if differs is not None:
            failure = self._compare_headers(differs, f"the ranks have called other collectives before number {differs}")
        elif flight is not None and is_stuck:
            failure = self._compare_headers(flight.header.sequence, None)
        if failure is None and flight is not None and is_stuck:
            failure = self._departed(flight.header.sequence)
        return failure

    def _compare_headers(self, sequence: int, otherwise: str | None) -> Failure | None:
        """What the ranks disagree about in collective ``sequence``, once they have all said; else ``otherwise``."""
        board = self.board
        if self._asked != sequence:
            self._asked = sequence
            board.ask(sequence)
        if not board.has_all_headers(sequence):
            return None
        text = describe_mismatch(board.headers(sequence)) or otherwise
        return None if text is None else Failure("mismatch", board.rank, text)

    def _departed(self, sequence: int) -> Failure | None:
        """A rank that has left in good order without entering the collective."""
        for rank in range(self.board.world_size):
            progress = self.board.progress(rank)
            if progress.closed and progress.sequence < sequence:
                return Failure("closed", rank, f"rank {rank} closed its transport")
        return None


def _describe(before: Progress, after: Progress, sequence: int) -> str:
    if after.closed:
        return "closed its transport" if after.sequence < sequence else "has left"
    if after.beat == before.beat:
        return "does not respond (it is stopped, or has died)"
    if after.sequence < sequence:
        return "has not entered it"
    if after.doing is None or after.doing > sequence:
        return "has ended it" if after.sequence > sequence else "has entered it"
    if after.doing < sequence:
        return f"is still in collective {after.doing}"
    return "is in it" if after.step is None else f"is in step {after.step}"


def _plural(text: str) -> str:
    verb, _, rest = text.partition(" ")
    return f"{_PLURALS.get(verb, verb)} {rest}"

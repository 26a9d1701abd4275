"""What the rank threads of one process share: unmatched transfers, headers, and the failure if there was one.

One lock guards all of it and is held for bookkeeping only, never while data moves. A rank that must wait sleeps on
a lock of its own, so that completing a transfer wakes exactly the rank that waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque

from microddp.errors import ClosedError, CollectiveTimeoutError, MismatchError, TransportError
from microddp.transport.base import Header
from microddp.transport.thread_call import (
    Awaited,
    Call,
    Meeting,
    Pair,
    Pending,
    RankState,
    awaited_text,
    missing_ranks,
)
from microddp.transport.thread_failure import Failure, call_text, header_mismatch, remote_failure

__all__ = ["WorldState"]


class WorldState:
    """The shared state of one world. Methods take the lock themselves, but for those that say otherwise."""

    def __init__(self, world_size: int) -> None:
        self.lock = threading.Lock()
        self.moved = threading.Condition(self.lock)  # for the rare wait for somebody else's move to end
        self.num_draining = 0
        self.ranks = [RankState(rank) for rank in range(world_size)]
        self.edges: defaultdict[tuple[int, int], deque[Pending]] = defaultdict(deque)
        self.meetings: dict[int, Meeting] = {}
        self.failure: Failure | None = None

    def refusal(self, state: RankState, where: str) -> BaseException | None:
        """Why this rank may not go on, or None. With the lock held."""
        if state.closed:
            why = f" (the world had failed: {self.failure.reason})" if self.failure else ""
            return ClosedError(f"rank {state.rank}, {where}: this transport was closed{why}")
        return self.failure.error_for(state.rank, where) if self.failure else None

    def fail(self, failure: Failure) -> None:
        """Makes ``failure`` the world's, unless it has one, and wakes every rank. With the lock held."""
        if self.failure is None:
            self.failure = failure
            self.edges.clear()
            self.meetings.clear()
            for state in self.ranks:
                state.wake()

    # ------------------------------------------------------------------------------------------- headers

    def enter(self, state: RankState, header: Header, deadline: float) -> Call | BaseException:
        """Records the rank's header and compares it with the first one of the same sequence."""
        rank, where = state.rank, f"opening {call_text(header)}"
        with self.lock:
            refusal = self.refusal(state, where)
            if refusal is not None:
                return refusal
            if header.sequence <= state.sequence:
                return ValueError(f"rank {rank}: collective {header.sequence} after collective {state.sequence}")
            if state.call is not None:
                return TransportError(f"rank {rank}, {where}: {call_text(state.call.header)} is not finished")
            meeting = self._meeting(state, header.sequence)
            if meeting.rejected:
                rejecter, error = next(iter(meeting.rejected.items()))
                self.fail(self._rejection(rejecter, error, meeting))
            elif meeting.header is None:
                meeting.header, meeting.first_rank = header, rank
            elif meeting.header != header:
                self.fail(header_mismatch(rank, header, meeting.first_rank, meeting.header))
            if self.failure is not None:
                return self.failure.error_for(rank, where)
            meeting.opened.add(rank)
            if len(meeting.opened) == len(self.ranks):
                self._complete(meeting, header.sequence)
            state.call = Call(state, header, deadline, meeting)
            return state.call

    def reject(self, state: RankState, sequence: int, error: BaseException) -> None:
        """Records that the rank refused collective ``sequence``; breaks the world if another rank is in it."""
        with self.lock:
            if self.failure is not None or state.closed or sequence <= state.sequence:
                return
            meeting = self._meeting(state, sequence)
            meeting.rejected[state.rank] = error
            if meeting.opened:
                self.fail(self._rejection(state.rank, error, meeting))
            elif len(meeting.rejected) == len(self.ranks):
                del self.meetings[sequence]

    def _meeting(self, state: RankState, sequence: int) -> Meeting:
        state.sequence = sequence
        return self.meetings.setdefault(sequence, Meeting())

    def _complete(self, meeting: Meeting, sequence: int) -> None:
        meeting.done = True
        del self.meetings[sequence]
        for state in self.ranks:
            if state.awaiting is meeting:
                state.wake()

    @staticmethod
    def _rejection(rank: int, error: BaseException, meeting: Meeting) -> Failure:
        failure = remote_failure(rank, error, "refused this collective with")
        failure.told.update(meeting.rejected)
        return failure

    # ------------------------------------------------------------------------------------------- transfers

    def match(self, call: Call, posted: list[Pending], pairs: list[Pair]) -> BaseException | None:
        """Queues each transfer on its edge or pairs it with the oldest one waiting at the other end.

        The caller must move the data of ``pairs``; until it has, both ends are marked with its thread.
        """
        rank, mover = call.state.rank, threading.get_ident()
        with self.lock:
            if self.failure is not None or call.state.closed:
                return self.refusal(call.state, f"posting in {call_text(call.header)}")
            if call.state.call is not call:
                return TransportError(f"rank {rank}: {call_text(call.header)} is finished")
            for mine in posted:
                peer = mine.transfer.peer
                edge = self.edges[(rank, peer) if mine.is_send else (peer, rank)]
                if edge and edge[0].is_send is not mine.is_send:
                    theirs = edge.popleft()
                    pairs.append((mine, theirs) if mine.is_send else (theirs, mine))
                    mine.mover = theirs.mover = mover
                else:
                    edge.append(mine)
        return None

    def complete(self, source: Pending, target: Pending) -> None:
        """Marks a pair as moved and wakes the rank that waits for it."""
        with self.lock:
            source.done = target.done = True
            if source.call.state.awaiting is source:
                source.call.state.wake()
            if target.call.state.awaiting is target:
                target.call.state.wake()
            if self.num_draining:
                self.moved.notify_all()

    def break_moves(self, call: Call, pairs: list[Pair], error: BaseException) -> BaseException:
        """Fails the world because ``error`` stopped this rank's moves; returns what this rank raises."""
        with self.lock:
            left = [pair for pair in pairs if not pair[0].done]
            if isinstance(error, MismatchError):
                self.fail(Failure(MismatchError, str(error)))
            elif left and isinstance(error, Exception):
                # The receiver's combine or view is at fault, whichever end happened to move the data.
                failure = remote_failure(left[0][1].call.state.rank, error, "could not take a message:")
                failure.told.clear()
                self.fail(failure)
            else:  # an interrupt of this thread
                self.fail(remote_failure(call.state.rank, error))
            for source, target in left:
                source.mover = target.mover = 0
            self.moved.notify_all()
            if not isinstance(error, Exception):
                return error
            return self.refusal(call.state, f"moving data in {call_text(call.header)}") or error

    def block(self, call: Call, awaited: Awaited) -> BaseException | None:
        """Sleeps until ``awaited`` is done; returns what the rank must raise if it never will be."""
        state = call.state
        while True:
            with self.lock:
                if awaited.done:
                    return None
                error = self._hopeless(call, awaited)
                if error is not None:
                    return error
                state.awaiting = awaited
                # Once data moves, its end is near, and leaving would pull the memory from under the mover.
                moving = isinstance(awaited, Pending) and awaited.mover != 0
            remaining = -1.0 if moving else min(max(call.deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if state.parker.acquire(timeout=remaining):
                continue
            with self.lock:
                if not state.is_asleep():  # woken between the time-out and the lock
                    state.parker.acquire()
                    continue
                state.awaiting = None
                if isinstance(awaited, Meeting) or awaited.mover == 0:
                    return self._time_out(call, awaited)

    def _hopeless(self, call: Call, awaited: Awaited) -> BaseException | None:
        if self.failure is None and not call.state.closed:
            gone = [rank for rank in missing_ranks(awaited, len(self.ranks)) if self.ranks[rank].closed]
            if not gone:
                return None
            self.fail(Failure(TransportError, f"rank {gone[0]} closed its transport"))
        return self.refusal(call.state, awaited_text(call, awaited, len(self.ranks)))

    def _time_out(self, call: Call, awaited: Awaited) -> BaseException:
        what = awaited_text(call, awaited, len(self.ranks))
        missing = [self.ranks[rank] for rank in missing_ranks(awaited, len(self.ranks))]
        peers = "; ".join(f"rank {peer.rank} {peer.progress(call.header)}" for peer in missing)
        error = CollectiveTimeoutError(f"rank {call.state.rank}, {what}: the deadline passed; {peers}")
        self.fail(remote_failure(call.state.rank, error, "gave up:"))
        return error

    # ------------------------------------------------------------------------------------------- the end

    def abort(self, state: RankState | None, error: BaseException) -> None:
        """Fails the world with a rank's error (None: its owner's) and waits until nobody touches its memory."""
        with self.lock:
            self.fail(remote_failure(None if state is None else state.rank, error))
            if state is not None and self.failure is not None:
                self.failure.told.add(state.rank)
        if state is not None:
            self.drain(state)

    def close(self, state: RankState) -> None:
        """Takes the rank out of the world: withdraws its transfers and wakes whoever waits for it."""
        with self.lock:
            if not state.closed:
                state.closed = True
                for (source, target), edge in self.edges.items():
                    if edge and state.rank == (source if edge[0].is_send else target):
                        edge.clear()
                for other in self.ranks:
                    other.wake()
        self.drain(state)

    def drain(self, state: RankState) -> None:
        """Waits until no other thread moves data of this rank's current collective."""
        call, this_thread = state.call, threading.get_ident()
        if call is None:
            return
        with self.lock:
            self.num_draining += 1
            self.moved.wait_for(lambda: all(each.done or each.mover in (0, this_thread) for each in call.posted))
            self.num_draining -= 1

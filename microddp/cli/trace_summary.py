"""What a trace says in figures: how long each rank waited and combined, and how much of the one hid the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from microddp.tracing import COMBINES, FUSED, HOST, TRANSFERS, Message, Recorded

__all__ = ["Summary", "summarise"]

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """One rank's figures, in nanoseconds.

    Attributes:
        total_ns: from the start of the collective to its end.
        wait_ns: of the host, for transfers.
        combine_ns: in combines and copies, those that are part of a receive included.
        num_groups: transfers, by step and slice, that were started together.
        overlap: the share of the time in combines that are no part of a receive, during which a message that the rank
            sends or receives was on its way; None without such combines.
    """

    rank: int
    total_ns: int
    wait_ns: int
    combine_ns: int
    num_groups: int
    overlap: float | None


def summarise(traces: Sequence[Sequence[Recorded]]) -> list[Summary]:
    """The figures of each rank, from the ranges of all; rank i's are ``traces[i]``."""
    travels = _travels([each for trace in traces for each in trace])
    return [_summary(rank, trace, travels) for rank, trace in enumerate(traces)]


def _summary(rank: int, trace: Sequence[Recorded], travels: dict[Message, Interval]) -> Summary:
    by_track: dict[str, list[Interval]] = {}
    for each in trace:
        by_track.setdefault(each.track, []).append((each.start_ns, each.end_ns))
    host = [each for each in trace if each.track == HOST]
    total = max((each.end_ns - each.start_ns for each in host), default=0)  # the whole holds the others
    waits = [(each.start_ns, each.end_ns) for each in host if each.name.startswith("wait ")]
    combines = _union(by_track.get(COMBINES, []))
    own = _union(interval for message, interval in travels.items() if rank in message[1:3])
    busy = _length(combines)
    overlap = _length(_common(combines, own)) / busy if busy else None
    combine_ns = _length(_union(by_track.get(FUSED, []))) + busy
    return Summary(rank, total, _length(_union(waits)), combine_ns, len(by_track.get(TRANSFERS, [])), overlap)


def _travels(ranges: Sequence[Recorded]) -> dict[Message, Interval]:
    """When each message was on its way: from when both ends had started it, until its receiver knew that it was there.

    A receive that waits long for a late sender does not count as a transfer that hides a combine.
    """
    sent = {message: each.start_ns for each in ranges for message in each.sends}
    travels = {}
    for each in ranges:
        for message in each.receives:
            if message in sent:
                start = max(sent[message], each.start_ns)
                travels[message] = (start, max(start, each.end_ns))
    return travels


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    pairs = ((max(one[0], other[0]), min(one[1], other[1])) for one in first for other in second)
    return [(start, end) for start, end in pairs if start < end]


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)

"""What every host transport must do when something goes wrong; each case breaks its world.

A runner calls ``fn(transport)`` on every rank of a new world of ``MIN_FAILURE_RANKS`` or more, keeps each rank's
transport as it is until all ranks are through, and reports what any rank raised.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from microddp.errors import CollectiveTimeoutError, MicroddpError, MismatchError, RemoteError, TransportError
from microddp.transport.base import Header, Transport
from tests.transport.contract_tools import DEADLINE_S, Case, make_header, next_sequence, poison, recv, send

__all__ = ["FIELD_CHANGES", "MIN_FAILURE_RANKS", "failure_cases"]

MIN_FAILURE_RANKS = 3

FIELD_CHANGES: dict[str, Any] = {
    "collective": "all_gather",
    "algorithm": "tree",
    "op": "max",
    "dtype": "torch.float16",
    "shape": (2, 3),
    "root": 1,
    "slice_nbytes": 512,
    "version": 2,
}


def _raises(transport: Transport, header: Header, *, posts: bool, deadline_s: float = DEADLINE_S) -> BaseException:
    """Runs one exchange with all peers (or an empty one) and returns the transport's error."""
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    try:
        opened = transport.open(header, time.monotonic() + deadline_s)
        if posts:
            sends = [send(peer, poison(3)) for peer in peers]
            opened.wait(opened.post([*sends, *(recv(peer, poison(3)) for peer in peers)]))
        opened.finish()
    except MicroddpError as error:
        return error
    raise AssertionError(f"rank {transport.rank}: no error was raised")


def _mismatch_case(field: str, odd: int, *, posts: bool, odd_posts: bool) -> Case:
    """Rank ``odd``'s header differs in ``field``: every rank raises, naming both ranks, the field's values."""

    def case(transport: Transport) -> None:
        header = make_header(next_sequence(transport))
        changed = FIELD_CHANGES[field]
        is_odd = transport.rank == odd
        mine = Header(**{**asdict(header), field: changed}) if is_odd else header
        error = _raises(transport, mine, posts=odd_posts if is_odd else posts)
        assert isinstance(error, MismatchError), repr(error)
        for part in (f"rank {odd}", field, str(changed), str(getattr(header, field))):
            assert part in str(error), f"{part!r} is not in {error}"

    return case


def _reject_on_one(transport: Transport) -> None:
    """One rank refuses its call: the others raise RemoteError with its rank and text."""
    sequence = next_sequence(transport)
    if transport.rank == 1:
        transport.reject(sequence, ValueError("bad shape (7,)"))
        return
    error = _raises(transport, make_header(sequence), posts=True)
    assert isinstance(error, RemoteError), repr(error)
    assert "rank 1" in str(error) and "bad shape (7,)" in str(error)


def _abort_from_one(transport: Transport) -> None:
    """One rank fails in the middle: the others raise RemoteError with its rank and text."""
    sequence = next_sequence(transport)
    if transport.rank == 1:
        transport.open(make_header(sequence), time.monotonic() + DEADLINE_S)
        transport.abort(RuntimeError("disk on fire"))
        return
    error = _raises(transport, make_header(sequence), posts=True)
    assert isinstance(error, RemoteError), repr(error)
    assert "rank 1" in str(error) and "disk on fire" in str(error)


def _leaves_early(transport: Transport) -> None:
    """One rank closes while the others wait for it: no one hangs."""
    sequence = next_sequence(transport)
    if transport.rank == 1:
        transport.close()
        return
    assert isinstance(_raises(transport, make_header(sequence), posts=True), TransportError)


def _deadline(transport: Transport) -> None:
    """Rank 1 posts nothing: the others raise by the deadline, one of them the time-out, and so does it."""
    header = make_header(next_sequence(transport))
    started = time.monotonic()
    if transport.rank == 1:
        transport.open(header, started + DEADLINE_S).finish()
        header = make_header(next_sequence(transport))
        error = _raises(transport, header, posts=False)
    else:
        error = _raises(transport, header, posts=True, deadline_s=1.0)
    assert time.monotonic() - started < 10.0
    assert isinstance(error, (CollectiveTimeoutError, RemoteError)), repr(error)
    assert f"rank {transport.rank}" in str(error)
    if transport.rank != 1:
        assert all(part in str(error) for part in ("rank 1", "ring", "step 0")), str(error)


def failure_cases() -> list[tuple[str, Case]]:
    """(name, fn) of each case that breaks its world: run each on a new one of ``MIN_FAILURE_RANKS`` or more."""
    cases = [(f"mismatch_{field}", _mismatch_case(field, 2, posts=True, odd_posts=True)) for field in FIELD_CHANGES]
    return [
        *cases,
        ("mismatch_none_against_some", _mismatch_case("shape", 0, posts=True, odd_posts=False)),
        ("mismatch_some_against_none", _mismatch_case("shape", 1, posts=False, odd_posts=True)),
        ("mismatch_both_empty", _mismatch_case("op", 1, posts=False, odd_posts=False)),
        ("reject_on_one", _reject_on_one),
        ("abort_from_one", _abort_from_one),
        ("leaves_early", _leaves_early),
        ("deadline", _deadline),
    ]

"""Ranks of a world of threads that leave or stay away: who waits for them raises, who does not is not disturbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from microddp.errors import ClosedError, CollectiveTimeoutError, MicroddpError, RemoteError, TransportError
from microddp.transport.thread import ThreadTransport, ThreadWorld
from tests.transport.contract_tools import DEADLINE_S, poison, recv, send
from tests.transport.thread_tools import (
    asleep,
    meet,
    no_thread_left,
    opened,
    play,
    receives_from,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("waits_for", ["data", "entry"])
def test_a_rank_that_leaves_is_named_to_those_who_wait(when: str, waits_for: str) -> None:
    world, left = ThreadWorld(3), threading.Event()

    def leaves(transport: ThreadTransport) -> None:
        if when == "while":
            wait_until(lambda: asleep(world, 0) and asleep(world, 2))
        transport.close()
        left.set()

    def waits(transport: ThreadTransport) -> None:
        if when == "before":
            left.wait(DEADLINE_S)
            wait_until(lambda: asleep(world, 2))
        receives_from(1)(transport) if waits_for == "data" else meet(transport)

    errors = play(world, waits, leaves, receives_from(0))
    wheres = ("waiting for rank 1 in all_reduce/ring .*step 4", "waiting for rank 0 in all_reduce/ring")
    for error, where in zip((errors[0], errors[2]), wheres, strict=True):
        with pytest.raises(TransportError, match="rank 1 closed its transport") as caught:
            raise error or AssertionError
        if waits_for == "data":
            assert caught.match(where)


def test_a_rank_that_leaves_disturbs_nobody_who_does_not_wait_for_it() -> None:
    world = ThreadWorld(3)
    world.transport(2).close()
    world.transport(2).close()
    first, second = (opened(world.transport(rank)) for rank in range(2))
    buffer = poison(1)
    first.post([send(1, torch.ones(1))])
    second.post([recv(0, buffer)])
    first.finish()
    second.finish()
    assert buffer.item() == 1.0
    with pytest.raises(ClosedError, match=r"rank 2, opening .*this transport was closed"):
        opened(world.transport(2))
    world.transport(2).reject(0, ValueError())
    meet_again = play(world, lambda transport: meet(transport, 1), lambda transport: meet(transport, 1))
    assert all(isinstance(error, TransportError) for error in meet_again)


def test_what_a_rank_posted_before_it_left_is_withdrawn() -> None:
    world = ThreadWorld(2)
    opened(world.transport(0)).post([send(1, torch.ones(1))])
    world.transport(0).close()
    buffer = torch.zeros(1)
    exchange = opened(world.transport(1))
    events = exchange.post([recv(0, buffer)])
    with pytest.raises(TransportError, match="rank 0 closed"):
        exchange.wait(events)
    assert buffer.item() == 0.0


def test_closing_a_rank_that_waits_itself() -> None:
    world = ThreadWorld(2)

    def closes(_: ThreadTransport) -> None:
        wait_until(lambda: asleep(world, 0))
        world.transport(0).close()

    assert isinstance(play(world, receives_from(1), closes)[0], ClosedError)


def test_a_deadline_names_rank_peer_collective_and_step_and_frees_the_others() -> None:
    """Rank 1 is wedged outside the transport; rank 2 waits for rank 0 with a far deadline."""
    world, released = ThreadWorld(3), threading.Event()

    def times_out(transport: ThreadTransport) -> None:
        wait_until(lambda: asleep(world, 2))
        exchange = opened(transport, deadline_s=0.2)
        started = time.monotonic()
        try:
            exchange.wait(exchange.post([recv(1, poison(1), 4)]))
        finally:
            assert 0.1 < time.monotonic() - started < 3.0
            released.set()

    errors = play(world, times_out, lambda _: released.wait(DEADLINE_S), receives_from(0))
    text = r"rank 0, waiting for rank 1 in all_reduce/ring \(collective 0\), step 4 .*rank 1 has not entered it"
    with pytest.raises(CollectiveTimeoutError, match=text):
        raise errors[0] or AssertionError
    with pytest.raises(RemoteError, match=rf"rank 2, waiting for rank 0 .*rank 0 gave up: .*{text}"):
        raise errors[2] or AssertionError
    for rank in range(3):
        with pytest.raises(MicroddpError, match="rank 0 gave up"):
            opened(world.transport(rank), 1)


def test_a_deadline_in_an_empty_collective_names_who_did_not_come() -> None:
    world = ThreadWorld(3)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0, waiting for rank 1, 2 to enter all_reduce/ring"):
        opened(world.transport(0), deadline_s=0.0).finish()

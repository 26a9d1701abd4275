"""The lifeline between threads of one process: what it passes on, to whom and how often, and what it leaves behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from microddp.transport import lifeline as lifeline_module
from microddp.transport.lifeline import MAX_TEXT, Lifeline
from microddp.transport.lifeline_link import Link
from microddp.transport.noticeboard import Failure

pytestmark = pytest.mark.timeout(30)

HOST = "127.0.0.1"
LIMIT_S = 10.0
BOOM = Failure("remote", 1, "rank 1 raised KeyError: 'é\n\U0001f600'")


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def lifeline_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("microddp-lifeline")]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = num_descriptors()
    yield
    assert eventually(lambda: not lifeline_threads() and num_descriptors() <= before)


class World:
    """``world_size`` lifelines, and what each rank has heard: failures, and ranks that left."""

    def __init__(self, world_size: int, then: Callable[[Lifeline], None] = lambda _: None) -> None:
        """Every rank does ``then`` as soon as it is connected itself."""
        self.store = HashStore()
        self.world_size = world_size
        self.failures: list[list[Failure]] = [[] for _ in range(world_size)]
        self.farewells: list[list[int]] = [[] for _ in range(world_size)]
        self.lifelines: dict[int, Lifeline] = {}
        self.errors: list[BaseException] = []
        threads = [threading.Thread(target=self._join, args=(rank, then)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)

    def _join(self, rank: int, then: Callable[[Lifeline], None]) -> None:
        try:
            self.lifelines[rank] = lifeline = Lifeline(
                self.store,
                rank,
                self.world_size,
                timeout=LIMIT_S,
                on_failure=self.failures[rank].append,
                on_farewell=self.farewells[rank].append,
                address=HOST,
            )
            then(lifeline)
        except Exception as error:
            self.errors.append(error)

    def __enter__(self) -> World:
        assert not self.errors and len(self.lifelines) == self.world_size
        return self

    def __exit__(self, *_: object) -> None:
        for lifeline in self.lifelines.values():
            lifeline.close()


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_published_failure_reaches_every_rank_once(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    send = Link.send

    def count(link: Link, message: dict[str, Any]) -> None:
        sent.append(message)
        send(link, message)

    monkeypatch.setattr(Link, "send", count)
    with World(world_size) as world:
        for _ in range(3):
            world.lifelines[1].publish(BOOM)
        assert eventually(lambda: all(world.failures))
        world.lifelines[0].publish(Failure("remote", 0, "too late"))
    assert world.failures == [[BOOM]] * world_size
    assert world.farewells == [[]] * world_size
    # Once round, both ways; each rank but the first has it from one side and tells the other.
    assert [message for message in sent if "failure" in message] == [{"failure": asdict(BOOM)}] * (world_size + 1)


def test_a_lost_connection_waits_for_a_better_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline_module, "LOST_GRACE_S", 2 * LIMIT_S)
    with World(3) as world:
        to_next = world.lifelines[0]._links[1]
        to_next.connection.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: to_next.ended and world.lifelines[1]._links[0].ended)
        world.lifelines[2].publish(BOOM)
        assert eventually(lambda: all(world.failures))
    assert world.failures == [[BOOM]] * 3


def test_of_two_failures_at_once_each_rank_hears_one() -> None:
    both = [Failure("remote", rank, f"from rank {rank}") for rank in (0, 4)]
    with World(8) as world:
        start = threading.Barrier(2)

        def publish(failure: Failure) -> None:
            start.wait(LIMIT_S)
            world.lifelines[failure.rank].publish(failure)

        threads = [threading.Thread(target=publish, args=(failure,)) for failure in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert eventually(lambda: all(world.failures))
    assert all(len(heard) == 1 and heard[0] in both for heard in world.failures)


@pytest.mark.parametrize(("world_size", "leaver"), [(2, 0), (2, 1), (5, 0), (5, 3)])
def test_who_leaves_in_order_is_no_failure_and_the_others_stay_linked(
    world_size: int, leaver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline_module, "LOST_GRACE_S", 0.0)  # a loss would be noticed at once
    others = [rank for rank in range(world_size) if rank != leaver]
    with World(world_size) as world:
        world.lifelines[leaver].close()
        world.lifelines[leaver].publish(BOOM)  # says nothing any more
        assert eventually(lambda: all(world.farewells[rank] for rank in others))
        assert all(world.lifelines[rank].departed == {leaver} for rank in others)
        links = [link for rank in others for link in world.lifelines[rank]._links if link.peer == leaver]
        assert eventually(lambda: all(link.ended for link in links))
        last = Failure("remote", others[-1], "later")
        world.lifelines[others[-1]].publish(last)
        assert eventually(lambda: all(world.failures[rank] for rank in others))
    for rank in range(world_size):
        assert world.farewells[rank] == ([] if rank == leaver else [leaver])
        assert world.failures[rank] == ([] if rank == leaver else [last])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_leave_as_soon_as_they_are_connected_themselves(world_size: int) -> None:
    for _ in range(10):
        with World(world_size, then=Lifeline.close) as world:
            pass
        assert world.failures == [[]] * world_size
        assert not lifeline_threads()


def test_alone_there_is_nobody_to_tell() -> None:
    with World(1) as world:
        world.lifelines[0].publish(Failure("remote", 0, "unheard"))
        assert not lifeline_threads()
    world.lifelines[0].close()
    assert world.failures == [[]]


def test_closing_is_quick_also_after_a_failure_and_from_a_callback() -> None:
    with World(3) as world:
        world.lifelines[2]._on_failure = lambda _: world.lifelines[2].close()
        world.lifelines[0].publish(BOOM)
        assert eventually(lambda: len(lifeline_threads()) == 2)
        started = time.monotonic()
        for lifeline in world.lifelines.values():
            lifeline.close()
            lifeline.close()
        assert time.monotonic() - started < 0.5
        assert not lifeline_threads()


def test_a_callback_that_raises_is_reported_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))

    def fail(_: int) -> None:
        raise KeyError("a bug of the callback's")

    with World(3) as world:
        world.lifelines[1]._on_farewell = fail
        world.lifelines[0].close()
        assert eventually(lambda: bool(reported) and bool(world.farewells[2]))
        world.lifelines[2].publish(BOOM)
        assert eventually(lambda: world.failures[1] == [BOOM])
    assert [type(error) for error in reported] == [KeyError]


def test_a_long_text_is_shortened_and_publishing_it_blocks_nobody() -> None:
    text = "start" + "\U0001f600" * 5_000_000 + "end"
    with World(4) as world:
        started = time.monotonic()
        world.lifelines[0].publish(Failure("remote", 0, text))
        assert time.monotonic() - started < 0.2
        assert eventually(lambda: all(world.failures))
    for (failure,) in world.failures:
        assert failure.text.startswith("start\U0001f600") and failure.text.endswith("\U0001f600end")
        assert f"[{len(text) - MAX_TEXT} characters left out]" in failure.text
        assert len(failure.text) < MAX_TEXT + 50


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in .*world size {world_size}"):
        Lifeline(HashStore(), rank, world_size, timeout=1, on_failure=lambda _: None)

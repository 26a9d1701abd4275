"""Failures in a world of threads reach every rank at once, in its own words, and leave nobody in another's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from microddp.errors import (
    ClosedError,
    MismatchError,
    RemoteError,
)
from microddp.transport.base import Header, Kind, Transfer
from microddp.transport.thread import ThreadTransport, ThreadWorld
from tests.transport.contract_failures import failure_cases
from tests.transport.contract_tools import DEADLINE_S, Case, poison, recv, send
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


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(("name", "case"), failure_cases(), ids=[name for name, _ in failure_cases()])
def test_contract(name: str, case: Case, world_size: int) -> None:
    started = time.monotonic()
    assert play(ThreadWorld(world_size), *[case] * world_size) == [None] * world_size
    assert time.monotonic() - started < 10.0


# ---------------------------------------------------------------------------------------------- headers


def called(dtype: str = "torch.float32", shape: tuple[int, ...] = (3,)) -> Header:
    return Header(0, "all_reduce", "ring", "sum", dtype, shape, -1, 1 << 20)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (called("torch.float16"), "rank 2 called all_reduce with dtype torch.float16, rank 0 with torch.float32"),
        (called(shape=(2, 3)), r"rank 2 called all_reduce with shape \(2, 3\), rank 0 with \(3,\)"),
        (called(shape=(0,)), r"rank 2 called all_reduce with shape \(0,\), rank 0 with \(3,\)"),
        (called("torch.int8", (4,)), r"with dtype torch.int8.*; rank 2 .* with shape \(4,\), rank 0 with \(3,\)"),
    ],
)
def test_a_mismatch_reaches_ranks_that_wait_and_ranks_that_come_late(odd: Header, text: str) -> None:
    """Rank 0 waits for data, rank 1 for everyone to enter; rank 2 brings the odd header; rank 3 comes afterwards."""
    world = ThreadWorld(4)
    first_in, failed = threading.Event(), threading.Event()

    def waits(transport: ThreadTransport) -> None:
        exchange = transport.open(called(), time.monotonic() + DEADLINE_S)
        first_in.set()
        exchange.wait(exchange.post([recv(3, poison(3))]))

    def meets(transport: ThreadTransport) -> None:
        first_in.wait(DEADLINE_S)
        transport.open(called(), time.monotonic() + DEADLINE_S).finish()

    def brings(transport: ThreadTransport) -> None:
        wait_until(lambda: asleep(world, 0) and asleep(world, 1))
        try:
            transport.open(odd, time.monotonic() + DEADLINE_S)
        finally:
            failed.set()

    def late(transport: ThreadTransport) -> None:
        failed.wait(DEADLINE_S)
        transport.open(called(), time.monotonic() + DEADLINE_S)

    for rank, error in enumerate(play(world, waits, meets, brings, late)):
        with pytest.raises(MismatchError, match=f"rank {rank}, .*{text}"):
            raise error or AssertionError(f"rank {rank} raised nothing")
        with pytest.raises(ClosedError, match=f"rank {rank}, .*closed by an earlier failure: .*{text}"):
            opened(world.transport(rank), 1)


# ---------------------------------------------------------------------------------------------- rejected calls


def test_a_call_that_all_ranks_reject_leaves_the_world_usable() -> None:
    world = ThreadWorld(3)

    def body(transport: ThreadTransport) -> None:
        for sequence in range(0, 20, 2):
            transport.reject(sequence, ValueError("negative size"))
            meet(transport, sequence + 1)

    assert play(world, body, body, body) == [None] * 3
    assert not world._state.meetings


@pytest.mark.parametrize("rejecter_first", [True, False])
def test_a_call_that_one_rank_rejects_fails_on_the_others(rejecter_first: bool) -> None:
    world = ThreadWorld(3)
    error = ValueError("negative size")

    def rejects(transport: ThreadTransport) -> None:
        meet(transport)
        if not rejecter_first:
            wait_until(lambda: asleep(world, 0) and asleep(world, 2))
        transport.reject(1, error)

    def enters(transport: ThreadTransport) -> None:
        meet(transport)
        if rejecter_first:
            wait_until(lambda: world._state.ranks[1].sequence == 1)
        meet(transport, 1)

    errors = play(world, enters, rejects, enters)
    assert errors[1] is None
    for rank in (0, 2):
        with pytest.raises(
            RemoteError, match=f"rank {rank}, .*rank 1 refused this collective with ValueError: negative"
        ):
            raise errors[rank] or AssertionError
        assert errors[rank].__cause__ is error  # type: ignore[union-attr]
    with pytest.raises(ClosedError, match=r"rank 1, .*rank 1 refused"):
        meet(world.transport(1), 2)
    world.transport(1).reject(2, error)  # never raises


# ---------------------------------------------------------------------------------------------- abort


def test_abort_is_told_to_pending_and_later_calls() -> None:
    """Rank 0 waits for data, rank 1 for rank 3 to enter, rank 2 aborts, rank 3 calls later."""
    world = ThreadWorld(4)
    original = RuntimeError("disk on fire")

    def aborts(transport: ThreadTransport) -> None:
        exchange = opened(transport)
        wait_until(lambda: asleep(world, 0) and asleep(world, 1))
        try:
            raise original
        except RuntimeError as error:
            transport.abort(error)
        transport.abort(KeyError("a second abort changes nothing"))
        exchange.post([send(0, poison(1))])

    errors = play(world, receives_from(2), meet, aborts)
    errors.append(play(world, *[lambda transport: None] * 3, meet)[3])
    assert isinstance(errors[2], ClosedError) and "rank 2 raised RuntimeError: disk on fire" in str(errors[2])
    wheres = {0: "waiting for rank 2 in all_reduce/ring .*step 4", 1: "waiting for rank 3 to enter", 3: "opening"}
    for rank, where in wheres.items():
        with pytest.raises(RemoteError, match=f"rank {rank}, {where}.*rank 2 raised RuntimeError: disk on") as caught:
            raise errors[rank] or AssertionError
        assert caught.value.__cause__ is original
        assert "Traceback" in str(caught.value) and "in aborts" in str(caught.value)
        for later in (meet, receives_from(2)):
            with pytest.raises(ClosedError, match="disk on fire"):
                later(world.transport(rank))


def test_abort_after_another_rank_has_failed_changes_nothing_and_is_not_told_again() -> None:
    world = ThreadWorld(2)
    world.transport(0).abort(RuntimeError("first"))
    world.transport(1).abort(RuntimeError("second"))
    for rank in range(2):
        with pytest.raises(ClosedError, match="rank 0 raised RuntimeError: first"):
            meet(world.transport(rank))


@pytest.mark.parametrize("call", ["wait", "finish", "post"])
def test_no_call_succeeds_after_an_abort(call: str) -> None:
    """Not even one whose transfers are complete."""
    world = ThreadWorld(2)
    first, second = (opened(world.transport(rank)) for rank in range(2))
    sent = first.post([send(1, poison(1))])
    second.wait(second.post([recv(0, poison(1))]))
    first.wait(sent)
    world.transport(1).abort(RuntimeError("late"))
    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: first.wait(sent),
        "finish": first.finish,
        "post": lambda: first.post([]),
    }
    with pytest.raises(RemoteError, match="rank 1 raised RuntimeError: late"):
        calls[call]()


def test_abort_by_the_owner_of_the_world() -> None:
    world = ThreadWorld(2)

    def aborts(_: ThreadTransport) -> None:
        wait_until(lambda: asleep(world, 0))
        world.abort(RuntimeError("enough"))

    error, _ = play(world, meet, aborts)
    assert isinstance(error, RemoteError) and "the owner of the world raised RuntimeError: enough" in str(error)


class Move:
    """A move of rank 0's tensor that stays in the middle until it is released."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.finished = False
        self.seen = torch.zeros(1)

    def combine(self, operand: torch.Tensor) -> None:
        self.entered.set()
        self.release.wait(DEADLINE_S)
        self.seen.copy_(operand)
        self.finished = True

    def reader(self, transport: ThreadTransport) -> None:
        opened(transport).post([Transfer(Kind.RECV_COMBINE, 0, 0, self.seen, self.combine)])


@pytest.mark.parametrize("how", ["abort", "close", "raise"])
def test_nobody_leaves_while_its_tensor_is_read(how: str) -> None:
    """Rank 0 leaves (or raises because rank 2 failed) while rank 1 reads its tensor: it waits for rank 1."""
    world, move, outgoing = ThreadWorld(3), Move(), torch.ones(1)

    def leaves(transport: ThreadTransport) -> None:
        exchange = opened(transport)
        exchange.post([send(1, outgoing)])
        assert move.entered.wait(DEADLINE_S)
        try:
            if how == "abort":
                transport.abort(RuntimeError("stop"))
            elif how == "close":
                transport.close()
            else:
                exchange.wait(exchange.post([recv(2, poison(1))]))
        except RemoteError:
            assert how == "raise"
        finished = move.finished
        outgoing.fill_(-1.0)
        assert finished, "rank 0 went on while rank 1 was reading its tensor"

    def releases(transport: ThreadTransport) -> None:
        assert move.entered.wait(DEADLINE_S)
        if how == "raise":
            wait_until(lambda: asleep(world, 0))
            transport.abort(RuntimeError("elsewhere"))
        wait_until(lambda: world._state.num_draining > 0)
        move.release.set()

    errors = play(world, leaves, move.reader, releases)
    assert errors[0] is None and errors[2] is None
    assert move.seen.item() == 1.0


@pytest.mark.parametrize("sender_moves", [True, False])
def test_a_combine_that_raises(sender_moves: bool) -> None:
    """The receiver raises the original error, whichever end moves the data; a bystander hears of it."""
    world, original = ThreadWorld(3), ZeroDivisionError("bad operator")

    def combine(_: torch.Tensor) -> None:
        raise original

    def sender(transport: ThreadTransport) -> None:
        exchange = opened(transport)
        if sender_moves:
            wait_until(lambda: asleep(world, 1))
        exchange.wait(exchange.post([send(1, torch.ones(1)), send(1, torch.ones(1))]))

    def receiver(transport: ThreadTransport) -> None:
        exchange = opened(transport)
        if not sender_moves:
            wait_until(lambda: asleep(world, 0))
        ends = [Transfer(Kind.RECV_COMBINE, 0, 0, poison(1), combine), recv(0, poison(1))]
        exchange.wait(exchange.post(ends))

    errors = play(world, sender, receiver, receives_from(0))
    assert errors[1] is original
    for rank in (0, 2):
        assert isinstance(errors[rank], RemoteError)
        assert "rank 1 could not take a message: ZeroDivisionError: bad operator" in str(errors[rank])

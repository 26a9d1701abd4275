"""How a lifeline finds its neighbours: strangers, ranks that do not come, die or have failed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from microddp.errors import CollectiveTimeoutError, RemoteError, TransportError
from microddp.transport.lifeline import Lifeline
from microddp.transport.lifeline_link import MAX_HELLO_NBYTES, MAX_MESSAGE_NBYTES, Link, wait_for
from microddp.transport.noticeboard import Failure, Noticeboard

pytestmark = pytest.mark.timeout(30)

HOST = "127.0.0.1"
LIMIT_S = 10.0
AT_ONCE_S = 2.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("microddp-lifeline")]


class Joining:
    """A rank that sets up its lifeline on a thread; it gives up after ``timeout``."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float = LIMIT_S) -> None:
        self.error: BaseException | None = None
        self.lifeline: Lifeline | None = None
        self.failures: list[Failure] = []
        self._started = time.monotonic()
        self._args = store, rank, world_size, timeout
        self._thread = threading.Thread(target=self._join)
        self._thread.start()

    def _join(self) -> None:
        store, rank, world_size, timeout = self._args
        try:
            hear = self.failures.append
            self.lifeline = Lifeline(store, rank, world_size, timeout=timeout, on_failure=hear, address=HOST)
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - self._started

    def result(self) -> Lifeline:
        self._thread.join(LIMIT_S)
        assert self.error is None and self.lifeline is not None, self.error
        return self.lifeline

    def failure(self, kind: type[BaseException] = TransportError) -> str:
        self._thread.join(LIMIT_S)
        assert type(self.error) is kind, self.error
        return str(self.error)


def place_of(store: Any, rank: int) -> tuple[str, int]:
    """Where that rank listens; it is about to."""
    deadline = time.monotonic() + LIMIT_S
    while not store.check([f"lifeline/{rank}"]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    address, port = json.loads(store.get(f"lifeline/{rank}"))
    return address, port


def close_all(*ranks: Joining) -> None:
    for rank in ranks:
        rank.result().close()
        assert rank.failures == []


def test_ranks_that_do_not_come_are_named_by_every_rank() -> None:
    store = HashStore()
    ranks = {rank: Joining(store, rank, 5, timeout=0.3) for rank in (0, 1, 3)}
    for rank, joining in ranks.items():
        text = joining.failure()
        assert text.startswith(f"rank {rank} of 5, ")
        assert "ranks 2, 4 did not come within 0.3 s" in text
        assert 0.29 < joining.seconds < 0.3 + AT_ONCE_S


def test_one_rank_that_gives_up_ends_the_wait_of_all() -> None:
    store = HashStore()
    patient, hasty = Joining(store, 0, 3), Joining(store, 1, 3, timeout=0.2)
    assert "rank 2 did not come within 0.2 s" in hasty.failure()
    text = patient.failure()
    assert text.startswith("rank 0 of 3, ") and "rank 1 gave up: rank 2 did not come within 0.2 s" in text
    assert patient.seconds < 0.2 + AT_ONCE_S


@pytest.mark.parametrize(("kind", "error"), [("remote", RemoteError), ("timeout", CollectiveTimeoutError)])
def test_a_failure_published_meanwhile_is_raised_at_once(kind: str, error: type[TransportError]) -> None:
    store = HashStore()
    waiting = Joining(store, 1, 3)
    place_of(store, 1)
    Noticeboard(store, 2, 3).publish(Failure(kind, 2, "rank 2 has no GPU"))
    assert waiting.failure(error) == "rank 1 of 3, connecting to the ranks beside it: rank 2 has no GPU"
    assert waiting.seconds < AT_ONCE_S


def hello(store: Any, place: tuple[str, int], rank: int) -> socket.socket:
    """Somebody who knows the token connects and claims to be ``rank``."""
    connection = socket.create_connection(place, LIMIT_S)
    token = store.get("lifeline/token").decode()
    connection.sendall(json.dumps({"token": token, "rank": rank}).encode() + b"\n")
    return connection


def test_a_neighbour_that_dies_during_set_up_is_noticed_at_once() -> None:
    store = HashStore()
    waiting = Joining(store, 0, 3)
    with hello(store, place_of(store, 0), 2) as connection:
        assert json.loads(connection.makefile().readline()) == {"welcome": 0}
    assert "rank 0 lost its connection to rank 2, which" in waiting.failure()
    assert waiting.seconds < AT_ONCE_S


def test_a_neighbour_that_listens_no_more_is_noticed_at_once() -> None:
    store = HashStore()
    with socket.socket() as gone:
        gone.bind((HOST, 0))
        port = gone.getsockname()[1]
    store.set("lifeline/1", json.dumps((HOST, port)))
    waiting = Joining(store, 0, 2)
    text = waiting.failure()
    assert f"rank 1, which listened on {HOST}:{port} (loopback" in text and "ConnectionRefusedError" in text
    assert waiting.seconds < AT_ONCE_S


def test_a_neighbour_that_does_not_answer_is_named_with_its_address() -> None:
    store = HashStore()
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        port = silent.getsockname()[1]
        store.set("lifeline/1", json.dumps((HOST, port)))
        waiting = Joining(store, 0, 2, timeout=0.3)
        assert "no connection with rank 1 was made within 0.3 s" in waiting.failure()


@pytest.mark.parametrize("first_words", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 2}\n', b"7\n", b"x" * 10**5])
def test_strangers_are_refused_and_disturb_nobody(first_words: bytes) -> None:
    store = HashStore()
    first = Joining(store, 0, 3)
    place = place_of(store, 0)
    strangers = [socket.create_connection(place, LIMIT_S) for _ in range(40)]
    strangers.append(hello(store, place, 1))  # knows the token, but is the wrong neighbour
    for stranger in strangers[:40]:
        try:
            stranger.sendall(first_words)
        except OSError:
            continue  # refused already
    others = [Joining(store, rank, 3) for rank in (1, 2)]
    close_all(first, *others)
    for stranger in strangers:
        with stranger:
            assert read_to_end(stranger) == b""


def read_to_end(connection: socket.socket) -> bytes:
    try:
        return connection.recv(100)  # times out if it is still open
    except ConnectionError:
        return b""


def test_who_comes_before_the_token_waits() -> None:
    store = HashStore()
    ranks = [Joining(store, rank, 3) for rank in (1, 2)]
    place_of(store, 1)
    place_of(store, 2)
    close_all(*ranks, Joining(store, 0, 3))


def test_an_address_that_is_not_of_this_host() -> None:
    with pytest.raises(TransportError, match=r"rank 0 of 2, .*cannot listen on 203\.0\.113\.7: "):
        Lifeline(HashStore(), 0, 2, timeout=5, on_failure=lambda _: None, address="203.0.113.7")


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            raise RuntimeError("the store has ended")

    with pytest.raises(TransportError, match=r"rank 1 of 2, .*the store has ended"):
        Lifeline(Gone(), 1, 2, timeout=5, on_failure=lambda _: None, address=HOST)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        client = socket.create_connection(listener.getsockname(), LIMIT_S)
        return client, listener.accept()[0]


@pytest.mark.parametrize(
    ("peer", "sent", "error"),
    [
        (None, b"x" * (MAX_HELLO_NBYTES + 1), "too long"),
        (1, b"x" * (MAX_MESSAGE_NBYTES + 1), "too long"),
        (1, b"[1]\n", "not a message"),
        (1, b"\xff\n", "not a message"),
        (1, b'{"a": 1}\n{"b"', "closed"),
    ],
)
def test_link_ends_where_it_cannot_understand(peer: int | None, sent: bytes, error: str) -> None:
    other, mine = tcp_pair()
    link = Link(mine, peer)

    def send() -> None:
        with other:
            other.sendall(sent)

    sending = threading.Thread(target=send)
    sending.start()
    while not link.ended:
        wait_for([link], [], LIMIT_S)
        link.read()
    assert error in link.error
    assert list(link.messages) == ([{"a": 1}] if error == "closed" else [])
    link.close()
    sending.join(LIMIT_S)


def test_link_keeps_what_a_full_connection_does_not_take() -> None:
    left, right = (Link(end, 0) for end in tcp_pair())
    messages = [{"number": number, "text": "x" * 10**5} for number in range(200)]
    started = time.monotonic()
    for message in messages:
        left.send(message)
    assert left.outbox and time.monotonic() - started < 1.0
    received: list[dict[str, Any]] = []
    while len(received) < len(messages):
        wait_for([left, right], [], LIMIT_S)
        left.flush()
        right.read()
        received += right.messages
        right.messages.clear()
    assert received == messages and not left.outbox
    left.close()
    right.close()

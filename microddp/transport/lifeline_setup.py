"""How the ring of a lifeline is made: every rank listens, says where in the store, and connects to the next rank.

Keys, beside those of ``noticeboard``:

* ``lifeline/token``: from rank 0; who connects must know it.
* ``lifeline/<rank>``: where that rank listens.

A rank that gives up publishes why, so that all others give up at once. A rank may leave as soon as it is connected:
what it said is still there for a neighbour that has yet to be connected to its other side.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from dataclasses import asdict
from typing import Any, Final

from torch.distributed import DistNetworkError

from microddp.errors import TransportError
from microddp.transport.addresses import is_loopback, local_address
from microddp.transport.lifeline_link import Link, guard_against_forks, wait_for
from microddp.transport.noticeboard import Failure, Noticeboard, connection_lost, name_ranks

__all__ = ["connect_ring"]

FIRST_PAUSE_S: Final = 0.002
MAX_PAUSE_S: Final = 0.05
MAX_STRANGERS: Final = 32
REASON_GRACE_S: Final = 0.5

TOKEN_KEY: Final = "lifeline/token"


def connect_ring(store: Any, rank: int, world_size: int, timeout: float, address: str | None) -> tuple[Link, Link]:
    """The links to the previous and to the next rank of the ring. Two ranks have two links between them.

    Raises:
        TransportError: a rank did not come within ``timeout`` seconds, died, or published a failure; or the store did
            not answer.
    """
    setup = _Setup(store, rank, world_size, timeout)
    try:
        setup.listen(address)
        while not setup.is_complete():
            setup.step()
        return setup.result()
    except TransportError:  # some of which are OSErrors too
        raise
    except (RuntimeError, OSError) as error:  # the store's, or a socket's
        if isinstance(error, DistNetworkError):
            setup.ask_neighbours()
            if setup.is_complete():
                return setup.result()
        raise setup.failed(f"{type(error).__name__}: {error}") from error
    finally:
        setup.end()


class _Setup:
    """The state of one rank's set-up."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self._store = store
        self._board = Noticeboard(store, rank, world_size)
        self._rank = rank
        self._world_size = world_size
        self._previous_rank = (rank - 1) % world_size
        self._next_rank = (rank + 1) % world_size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._pause_s = FIRST_PAUSE_S
        self._listener: socket.socket | None = None
        self._token: str | None = None
        self._strangers: list[Link] = []
        self._previous: Link | None = None
        self._next: Link | None = None
        self._next_place = ""
        self._is_welcome = False
        self._complete = False

    def listen(self, address: str | None) -> None:
        """Listens, and says where."""
        address = address or local_address(self._store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        guard_against_forks(self._listener)
        self._listener.setblocking(False)
        try:
            self._listener.bind((address, 0))
        except OSError as error:
            raise self.failed(f"cannot listen on {address}: {error.strerror or error}") from error
        self._listener.listen()
        if self._rank == 0:
            self._token = secrets.token_hex(16)
            self._store.set(TOKEN_KEY, self._token)
        place = (address, self._listener.getsockname()[1])
        self._store.set(f"lifeline/{self._rank}", json.dumps(place))

    def is_complete(self) -> bool:
        """Both links stand."""
        return self._previous is not None and self._is_welcome

    def step(self) -> None:
        """Waits for a moment, then goes as far as it can."""
        self._look_into_store()
        self._hear(max(min(self._pause_s, self._deadline - time.monotonic()), 0.0))
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if not self.is_complete() and time.monotonic() >= self._deadline:
            raise self.failed(f"{self._describe_absent()} within {self._timeout:g} s")

    def ask_neighbours(self) -> None:
        """The store is gone: waits a moment for a neighbour to tell which rank died with it.

        Also for one that has yet to connect or to answer: the lifeline may come to stand, and will hear of it then.

        Raises:
            TransportError: it has told.
        """
        until = time.monotonic() + REASON_GRACE_S
        while not self.is_complete() and (remaining := until - time.monotonic()) > 0:
            self._hear(remaining)

    def result(self) -> tuple[Link, Link]:
        """The links."""
        assert self._previous is not None and self._next is not None
        self._complete = True
        return self._previous, self._next

    def end(self) -> None:
        """Leaves no socket open but those of the result."""
        if self._listener is not None:
            self._listener.close()
        for link in self._strangers:
            link.close()
        for known in (self._previous, self._next):
            if known is not None and not self._complete:
                known.close()

    def failed(self, why: str) -> TransportError:
        """Tells the other ranks that this one gives up; returns what to raise: the first reason that any rank had."""
        suspicion = Failure("lost", self._rank, f"rank {self._rank} gave up: {why}")
        return self._published(suspicion)

    def _published(self, suspicion: Failure) -> TransportError:
        context = f"rank {self._rank} of {self._world_size}, connecting to the ranks beside it"
        try:
            failure = self._board.publish(suspicion)
        except (RuntimeError, OSError):
            failure = suspicion
        for link in (self._previous, self._next):
            if link is not None:
                link.send({"failure": asdict(failure)})  # not all may learn of it from the store
        return failure.exception(context)

    def _look_into_store(self) -> None:
        failure = self._board.failure()
        if failure is not None:
            raise self._published(failure)
        if self._token is None and self._store.check([TOKEN_KEY]):
            self._token = self._store.get(TOKEN_KEY).decode()
        if self._token is not None and self._next is None and self._has_come(self._next_rank):
            self._connect(*json.loads(self._store.get(f"lifeline/{self._next_rank}")))

    def _connect(self, address: str, port: int) -> None:
        hint = " (loopback: only its own host reaches it)" if is_loopback(address) else ""
        self._next_place = f"{address}:{port}{hint}"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._next = Link(socket.socket(family, socket.SOCK_STREAM), self._next_rank)
        self._next.connection.connect_ex((address, port))  # goes on by itself; an error comes with the first use
        self._next.send({"token": self._token, "rank": self._rank})

    def _hear(self, patience_s: float) -> None:
        """Waits until a neighbour connects or says something, then takes it."""
        assert self._listener is not None
        known = [link for link in (self._previous, self._next) if link is not None]
        strangers = self._strangers if self._token is not None else []
        wait_for([*strangers, *known], [self._listener], patience_s)
        self._accept(self._listener)
        self._hear_strangers()
        for link in known:
            link.flush()
            link.read()
            self._check(link)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                self._strangers.append(Link(listener.accept()[0]))
            except (BlockingIOError, ConnectionError):
                break
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.pop(0).close()

    def _hear_strangers(self) -> None:
        if self._token is None:
            return  # who comes early has to wait
        for link in list(self._strangers):
            link.read()
            if not link.messages and not link.ended:
                continue
            self._strangers.remove(link)
            hello = link.messages.popleft() if link.messages else {}
            if self._previous is None and self._is_previous(hello):
                self._previous = link
                link.peer = self._previous_rank
                link.send({"welcome": self._rank})
                self._check(link)
            else:
                link.close()

    def _is_previous(self, hello: dict[str, Any]) -> bool:
        token = str(hello.get("token"))
        is_one_of_us = self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())
        return is_one_of_us and hello.get("rank") == self._previous_rank

    def _check(self, link: Link) -> None:
        """Looks at what a neighbour said. What is not about the set-up stays in the link."""
        if link is self._next and not self._is_welcome and link.messages:
            self._is_welcome = link.messages.popleft() == {"welcome": self._next_rank}
        for message in link.messages:
            if "failure" in message:
                raise self._published(Failure(**message["failure"]))
        if not link.ended or {"farewell": link.peer} in link.messages:
            return
        if link is self._next and not self._is_welcome:
            who = f"rank {self._next_rank}, which listened on {self._next_place},"
            raise self.failed(f"{who} cannot be reached: {link.error}")
        raise self._published(connection_lost(self._rank, link.peer))

    def _has_come(self, rank: int) -> bool:
        return bool(self._store.check([f"lifeline/{rank}"]))

    def _describe_absent(self) -> str:
        absent = [rank for rank in range(self._world_size) if not self._has_come(rank)]
        if absent:
            return f"{name_ranks(absent)} did not come"
        if self._previous is None and not self._is_welcome:
            neighbours = sorted({self._previous_rank, self._next_rank})
            return f"no connection with {name_ranks(neighbours)} was made"
        if self._previous is None:
            return f"rank {self._previous_rank} did not connect"
        return f"rank {self._next_rank}, which listens on {self._next_place}, did not answer"

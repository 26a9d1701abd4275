"""One TCP connection between two ranks that carries short messages, each a line of JSON. Nothing here ever blocks."""

from __future__ import annotations

import json
import os
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["MAX_MESSAGE_NBYTES", "Link", "guard_against_forks", "wait_for"]

MAX_MESSAGE_NBYTES: Final = 1 << 20
MAX_HELLO_NBYTES: Final = 512
"""What a stranger may make this rank remember."""

READ_NBYTES: Final = 1 << 16

# A host that lost its power or its network ends no connection: after about 15 s of silence its kernel is asked.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Link:
    """Messages to and from one peer.

    Attributes:
        peer: the rank at the other end; None until it has said so, which it must within a few bytes.
        messages: what came and has not been taken from here.
        outbox: what the connection has not accepted yet.
        ended: nothing more will come; ``error`` may say why.
    """

    def __init__(self, connection: socket.socket, peer: int | None = None) -> None:
        self.connection = connection
        self.peer = peer
        self.messages: deque[dict[str, Any]] = deque()
        self.outbox = bytearray()
        self.ended = False
        self.error = ""
        self._inbox = bytearray()
        guard_against_forks(connection)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict[str, Any]) -> None:
        """Sends what the connection takes at once; ``flush`` sends the rest."""
        if not self.ended:
            self.outbox += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Sends more of what is left. A connection that cannot is noticed by ``read``, which first takes what came."""
        try:
            while self.outbox and not self.ended:
                del self.outbox[: self.connection.send(self.outbox)]
        except BlockingIOError:
            return
        except OSError as error:
            self.error = self.error or _describe(error)
            self.outbox.clear()

    def read(self) -> None:
        """Takes what has come."""
        try:
            while not self.ended:
                data = self.connection.recv(READ_NBYTES)
                if data:
                    self._split(data)
                else:
                    self._end("it closed the connection")
        except BlockingIOError:
            return
        except OSError as error:
            self._end(_describe(error))

    def close(self) -> None:
        """Ends the connection after what the peer has been sent. Idempotent."""
        self.ended = True
        self.connection.close()

    def _split(self, data: bytes) -> None:
        self._inbox += data
        *lines, self._inbox = self._inbox.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self._end("it sent something that is not a message")
                return
            self.messages.append(message)
        if len(self._inbox) > (MAX_HELLO_NBYTES if self.peer is None else MAX_MESSAGE_NBYTES):
            self._end("it sent too long a message")

    def _end(self, error: str) -> None:
        self.ended = True
        self.error = self.error or error
        self.outbox.clear()
        self._inbox.clear()


def wait_for(links: Iterable[Link], others: Iterable[socket.socket], timeout: float | None) -> None:
    """Waits until a link can be read, or flushed if it has to be, or another socket can be read."""
    with selectors.DefaultSelector() as selector:
        for other in others:
            selector.register(other, selectors.EVENT_READ)
        for link in links:
            if not link.ended:
                write = selectors.EVENT_WRITE if link.outbox else 0
                selector.register(link.connection, selectors.EVENT_READ | write)
        selector.select(timeout)


def guard_against_forks(connection: socket.socket) -> None:
    """Has forked children close their copies: with one of them left, this process's death would end no connection."""
    _open.add(connection)


def _close_copies() -> None:
    for connection in list(_open):
        connection.close()


def _describe(error: OSError) -> str:
    return f"{type(error).__name__}: {error.strerror or error}"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)

"""Helpers to drive rank threads into a known state without sleeping for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from microddp.transport.base import Exchange, Kind, Transfer
from microddp.transport.thread import ThreadTransport, ThreadWorld
from tests.transport.contract_tools import DEADLINE_S, make_header, poison, recv

__all__ = ["asleep", "meet", "no_thread_left", "opened", "play", "receives_from", "recv_add", "start", "wait_until"]


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Fails if a thread lives that did not live before."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def recv_add(peer: int, view: torch.Tensor, step: int = 0) -> Transfer:
    """A fused receive that adds to ``view``."""

    def combine(operand: torch.Tensor) -> None:
        view.add_(operand)

    return Transfer(Kind.RECV_COMBINE, peer, step, view, combine)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls until ``condition`` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited state never came"
        time.sleep(1e-4)


def asleep(world: ThreadWorld, rank: int) -> bool:
    """Whether the rank waits for others."""
    return world._state.ranks[rank].is_asleep()


def start(*bodies: Callable[[], None]) -> list[threading.Thread]:
    """Starts a thread for each body."""
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def play(world: ThreadWorld, *bodies: Callable[[ThreadTransport], object]) -> list[BaseException | None]:
    """Runs body r with rank r's transport, all at once; returns what each raised. Nothing is closed."""
    errors: list[BaseException | None] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            bodies[rank](world.transport(rank))
        except BaseException as error:
            errors[rank] = error

    for thread in start(*(partial(run, rank) for rank in range(len(bodies)))):
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return errors


def opened(transport: ThreadTransport, sequence: int = 0, deadline_s: float = DEADLINE_S) -> Exchange:
    """An exchange whose header all ranks share."""
    return transport.open(make_header(sequence), time.monotonic() + deadline_s)


def meet(transport: ThreadTransport, sequence: int = 0) -> None:
    """An empty collective."""
    opened(transport, sequence).finish()


def receives_from(peer: int, sequence: int = 0) -> Callable[[ThreadTransport], None]:
    """A body that waits for one element of ``peer``, in step 4."""

    def body(transport: ThreadTransport) -> None:
        exchange = opened(transport, sequence)
        exchange.wait(exchange.post([recv(peer, poison(1), 4)]))

    return body

"""What the workers of a Gloo test run. A world of its own, which may break, costs milliseconds inside a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from microddp.errors import ClosedError, MicroddpError
from microddp.rendezvous import gloo_from_environment
from microddp.transport.base import Header, Transport
from microddp.transport.gloo import GlooTransport
from tests.transport.contract import contract_cases
from tests.transport.contract_failures import failure_cases
from tests.transport.contract_tools import (
    DEADLINE_S,
    exchange,
    make_header,
    neighbours,
    next_sequence,
    poison,
    recv,
    send,
)

Report = tuple[str, str, float]  # the error's type, its text, seconds until it was raised


def barrier(transport: Transport) -> None:
    """All ranks of the pool have come here."""
    transport.open(make_header(next_sequence(transport), numel=0), time.monotonic() + DEADLINE_S).finish()


@contextmanager
def new_world(pool: GlooTransport) -> Iterator[GlooTransport]:
    """A transport between the same processes; kept until all ranks are through."""
    world = gloo_from_environment()
    barrier(pool)
    try:
        yield world
    finally:
        barrier(pool)
        world.close()


def contract(transport: GlooTransport, name: str) -> None:
    """One case of the contract."""
    dict(contract_cases())[name](transport)


def broken_contract(pool: GlooTransport, name: str) -> float:
    """One case that breaks its world; returns how long it took."""
    with new_world(pool) as world:
        started = time.monotonic()
        dict(failure_cases())[name](world)
        return time.monotonic() - started


def attempt(transport: Transport, header: Header, *, numel: int = 3, deadline_s: float = DEADLINE_S) -> Report:
    """A ring of n - 1 steps under ``header`` (nothing at all where ``numel`` is 0) and what came of it."""
    left, right = neighbours(transport)
    started = time.monotonic()
    try:
        opened = transport.open(header, started + deadline_s)
        for step in range(transport.world_size - 1 if numel else 0):
            opened.wait(opened.post([send(right, poison(numel), step), recv(left, poison(numel), step)]))
        opened.finish()
    except MicroddpError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def mismatch(pool: GlooTransport, odd: int, changes: dict[str, Any], numels: tuple[int, int]) -> tuple[Report, Report]:
    """Rank ``odd``'s header has ``changes``; (others', its) numel. Also what a later call gives."""
    with new_world(pool) as world:
        assert attempt(world, make_header(next_sequence(world)))[0] == ""
        header = make_header(next_sequence(world), numel=numels[0])
        is_odd = world.rank == odd
        mine = Header(**{**asdict(header), **changes}) if is_odd else header
        first = attempt(world, mine, numel=numels[is_odd])
        return first, attempt(world, make_header(next_sequence(world)))


def off_by_one(pool: GlooTransport, odd: int) -> Report:
    """Rank ``odd`` leaves out a call, and its next one is another."""
    with new_world(pool) as world:
        headers = [make_header(0), make_header(0, numel=7)]
        skipped = headers[1:] if world.rank == odd else headers
        return attempt(world, skipped[0])


def rejected_by_all(pool: GlooTransport) -> list[Report]:
    """All ranks refuse a collective: the next ones work."""
    with new_world(pool) as world:
        for sequence in (0, 1):
            world.reject(sequence, ValueError("no such operator"))
        return [attempt(world, make_header(sequence)) for sequence in (2, 3)]


def rejected_by_one(pool: GlooTransport, odd: int, numel: int) -> list[Report]:
    """Rank ``odd`` refuses a collective that the others enter, then goes on."""
    with new_world(pool) as world:
        if world.rank == odd:
            world.reject(0, ValueError("no such operator"))
            return [attempt(world, make_header(1, numel=numel), numel=numel)]
        return [attempt(world, make_header(0, numel=numel), numel=numel), attempt(world, make_header(1))]


def late_rank(pool: GlooTransport, late: int, deadline_s: float) -> list[Report]:
    """Rank ``late`` enters after the others' deadline; then all call again."""
    with new_world(pool) as world:
        if world.rank == late:
            barrier(pool)
        first = attempt(world, make_header(0), deadline_s=deadline_s if world.rank != late else DEADLINE_S)
        if world.rank != late:
            barrier(pool)
        return [first, attempt(world, make_header(1))]


def two_worlds(pool: GlooTransport) -> None:
    """Two transports of one process, their collectives interleaved; one breaks, the other works on."""
    with new_world(pool) as first, new_world(pool) as second:
        for _ in range(10):
            with exchange(first) as one, exchange(second) as other:
                left, right = neighbours(pool)
                buffers = [poison(4), poison(4)]
                one_sent = one.post([send(right, poison(4).fill_(1)), recv(left, buffers[0])])
                other.wait(other.post([send(right, poison(4).fill_(2)), recv(left, buffers[1])]))
                one.wait(one_sent)
            assert [buffer.tolist() for buffer in buffers] == [[1.0] * 4, [2.0] * 4]
        first.abort(RuntimeError("enough"))
        assert attempt(first, make_header(99))[0] == "ClosedError"
        assert attempt(second, make_header(next_sequence(second)))[0] == ""


def close_variants(pool: GlooTransport) -> list[float]:
    """Seconds for closing twice, after a failure, with an exchange open, and never having been used."""
    seconds = []
    for use in ("twice", "failed", "open", "unused"):
        world = gloo_from_environment()
        barrier(pool)
        if use == "twice":
            attempt(world, make_header(0))
            world.close()
        elif use == "failed":
            world.abort(RuntimeError("enough"))
        elif use == "open":
            opened = world.open(make_header(0), time.monotonic() + DEADLINE_S)
            opened.post([recv(neighbours(world)[0], poison(3))])
            barrier(pool)  # no peer has closed while this rank still posts
        started = time.monotonic()
        world.close()
        seconds.append(time.monotonic() - started)
        try:
            world.open(make_header(5), time.monotonic() + DEADLINE_S)
        except ClosedError:
            barrier(pool)
            continue
        raise AssertionError(f"{use}: a closed transport was opened")
    return seconds


def same_header_other_sizes(pool: GlooTransport, odd: int) -> Report:
    """Rank ``odd`` sends and expects more than the others, under the same header."""
    with new_world(pool) as world:
        return attempt(world, make_header(0), numel=7 if world.rank == odd else 3, deadline_s=1.5)

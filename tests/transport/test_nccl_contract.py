"""The NCCL transport keeps the contract of all transports, over the stand-in, with threads as ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from microddp.errors import MicroddpError
from microddp.transport.base import Transport
from microddp.transport.nccl import NcclTransport
from tests.nccl.conftest import standin, standin_library
from tests.nccl.ranks_tools import on_ranks, quick_switches
from tests.nccl.standin_runtime import StandInRuntime
from tests.transport.contract import contract_cases
from tests.transport.contract_failures import MIN_FAILURE_RANKS, failure_cases
from tests.transport.contract_tools import (
    DEADLINE_S,
    Case,
    exchange,
    make_header,
    message,
    neighbours,
    next_sequence,
    poison,
    recv,
    same_bytes,
    send,
)

__all__ = ["standin", "standin_library"]

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(100)]

PERIOD_S = 0.5  # after that long in one collective a watchdog compares headers
CROSSED = {"ping", "posting_order", "sender_overwrites_after_wait"}
"""They post a send, and in a group after it the receive that the peer's send needs: on one queue that is a deadlock."""

CASES = [(name, case) for name, case in contract_cases() if name not in CROSSED]
RUNTIMES: dict[str, Callable[[], StandInRuntime]] = {
    "host": StandInRuntime,
    "streams": partial(StandInRuntime, blocking=False),
}


@pytest.fixture(scope="module", autouse=True)
def played_fast() -> Iterator[None]:
    with quick_switches():
        yield


def groups_in_order(transport: Transport) -> None:
    """In place of the crossed ones: messages alike in size match in posting order over groups and within one.

    Awaited one by one and late; what was sent may be overwritten then.
    """
    left, right = neighbours(transport)
    if left == transport.rank:
        return
    outgoing = [message(transport.rank, right, salt, 4) for salt in range(8)]
    incoming = [poison(4) for _ in range(8)]
    pairs = [(send(right, out), recv(left, into)) for out, into in zip(outgoing, incoming)]
    with exchange(transport) as opened:
        events = [opened.post(pair) for pair in pairs[:4]]
        events += [opened.post([each for pair in pairs[4:] for each in pair])]
        opened.wait([])
        for each in events:
            opened.wait(each[:1])
        for buffer in outgoing:
            buffer.copy_(poison(4))
    for salt, buffer in enumerate(incoming):
        assert same_bytes(buffer, message(left, transport.rank, salt, 4)), f"message {salt}"


def test_crossed_cases_are_there_and_others_too() -> None:
    names = {name for name, _ in contract_cases()}
    assert names > CROSSED and len(CASES) + len(CROSSED) == len(names)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_contract(world_size: int) -> None:
    """One world for all cases: none may leave anything behind for the next."""

    def body(transport: NcclTransport) -> None:
        for name, case in [*CASES, ("groups_in_order", groups_in_order)]:
            try:
                case(transport)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error

    on_ranks(world_size, body, make_runtime=RUNTIMES["streams" if world_size % 2 else "host"]).checked()


def is_usable(transport: Transport) -> bool:
    try:
        transport.open(make_header(next_sequence(transport)), time.monotonic() + DEADLINE_S)
    except MicroddpError:
        return False
    return True


@pytest.mark.parametrize(("name", "case"), failure_cases(), ids=[name for name, _ in failure_cases()])
def test_broken_contract(name: str, case: Case) -> None:
    """Every rank raises in time, and the transport says why it cannot be used any more."""

    def body(transport: NcclTransport) -> bool:
        case(transport)
        return is_usable(transport)

    ranks = on_ranks(MIN_FAILURE_RANKS, body, make_runtime=RUNTIMES["streams"])
    assert not any(ranks.checked())
    assert ranks.seconds < PERIOD_S + 2

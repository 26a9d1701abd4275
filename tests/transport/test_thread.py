"""The threads transport keeps the contract; its ends meet in any order, and a send outlasts its reader."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from microddp.errors import CollectiveTimeoutError, MismatchError, TransportError
from microddp.transport.base import Exchange, Header, Kind, Transfer
from microddp.transport.thread import ThreadTransport, ThreadWorld, run_thread_ranks
from tests.transport.contract import contract_cases
from tests.transport.contract_tools import DEADLINE_S, Case, exchange, make_header, poison, recv, send
from tests.transport.thread_tools import asleep, no_thread_left, recv_add, start, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(("name", "case"), contract_cases(), ids=[name for name, _ in contract_cases()])
def test_contract(name: str, case: Case, world_size: int) -> None:
    run_thread_ranks(case, world_size, timeout=50)


def test_contract_in_a_row_leaves_nothing_behind() -> None:
    worlds: list[ThreadWorld] = []

    def body(transport: ThreadTransport) -> None:
        for _, case in contract_cases() * 2:
            case(transport)

    original = ThreadWorld.__init__

    def remember(world: ThreadWorld, world_size: int) -> None:
        original(world, world_size)
        worlds.append(world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadWorld, "__init__", remember)
        run_thread_ranks(body, 3, timeout=50)
    state = worlds[0]._state
    assert not state.meetings
    assert not any(state.edges.values())


def open_pair(world: ThreadWorld, deadline_s: float = DEADLINE_S) -> list[Exchange]:
    """Both ranks' exchanges, for one thread that plays both."""
    deadline = time.monotonic() + deadline_s
    return [world.transport(rank).open(make_header(0), deadline) for rank in range(2)]


def test_a_send_is_not_complete_before_its_reader_came() -> None:
    first, _ = open_pair(ThreadWorld(2), deadline_s=0.0)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0, waiting for rank 1 .*posted nothing that matches"):
        first.wait(first.post([send(1, poison(1))]))


@pytest.mark.parametrize("begins", ["before", "after"])
@pytest.mark.parametrize("deadline_s", [0.1, DEADLINE_S], ids=["near", "far"])
def test_a_send_waits_for_the_end_of_the_move(deadline_s: float, begins: str) -> None:
    """Also beyond its deadline, as leaving would pull the memory from under the reader, who begins before or after."""
    world = ThreadWorld(2)
    first, second = open_pair(world, deadline_s)
    near_end = time.monotonic() + 0.2
    outgoing, total, seen = torch.ones(4), torch.zeros(4), list[bool]()
    sent = first.post([send(1, outgoing)])
    entered, finished = threading.Event(), threading.Event()

    def combine(operand: torch.Tensor) -> None:
        entered.set()
        wait_until(lambda: bool(seen) or (asleep(world, 0) and time.monotonic() > near_end))
        total.add_(operand)
        finished.set()

    def sender() -> None:
        if begins == "before":
            assert entered.wait(DEADLINE_S)
        first.wait(sent)
        seen.append(finished.is_set())
        outgoing.fill_(7.0)

    (thread,) = start(sender)
    if begins == "after":
        wait_until(lambda: asleep(world, 0))
    second.post([Transfer(Kind.RECV_COMBINE, 0, 0, total, combine)])
    thread.join(DEADLINE_S)
    assert seen == [True]
    assert total.tolist() == [1.0] * 4


def test_a_message_that_comes_as_the_deadline_passes() -> None:
    """The reader completes the send between the sender's time-out and its next look: no error, no stray wake-up."""
    world = ThreadWorld(2)
    first, second = open_pair(world)
    state = world._state.ranks[0]
    parker = state.parker

    class LateParker:
        def acquire(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return parker.acquire(timeout=DEADLINE_S)
            second.post([recv(0, poison(1))])
            return False

        def release(self) -> None:
            parker.release()

    state.parker = LateParker()  # type: ignore[assignment]
    first.wait(first.post([send(1, torch.ones(1))]))
    assert parker.locked()
    state.parker = parker


@pytest.mark.parametrize("receiver_first", [True, False])
@pytest.mark.parametrize(
    ("sent", "expected", "named"),
    [
        (torch.zeros(4), torch.zeros(8), ("4 elements", "8 elements")),
        (torch.zeros(8), torch.zeros(4), ("8 elements", "4 elements")),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), ("torch.float32", "torch.int32")),
    ],
)
def test_ends_that_disagree(
    sent: torch.Tensor, expected: torch.Tensor, named: tuple[str, str], receiver_first: bool
) -> None:
    first, second = open_pair(ThreadWorld(2))
    ends = [(first, send(1, sent)), (second, recv(0, expected))]
    (early, early_end), (late, late_end) = reversed(ends) if receiver_first else ends
    waiting = early.post([early_end])
    with pytest.raises(MismatchError) as at_the_match:
        late.post([late_end])
    with pytest.raises(MismatchError) as in_the_wait:
        early.wait(waiting)
    for error in (at_the_match.value, in_the_wait.value):
        assert all(text in str(error) for text in (*named, "rank 0 sends", "rank 1 expects"))
    assert expected.tolist() == [0] * expected.numel()


def test_a_message_of_another_collective_is_not_taken() -> None:
    world = ThreadWorld(2)
    first = world.transport(0).open(make_header(0), time.monotonic() + DEADLINE_S)
    second = world.transport(1).open(make_header(1), time.monotonic() + DEADLINE_S)
    first.post([send(1, torch.ones(1))])
    with pytest.raises(MismatchError, match=r"collective 0.*collective 1"):
        second.post([recv(0, poison(1))])


@pytest.mark.parametrize("seed", range(12))
def test_fused_combines_in_random_posting_orders(seed: int) -> None:
    """Every rank adds three messages of each peer into one cell per message, whatever the order of its posts."""
    world_size, per_edge = 4, 3

    def value(source: int, target: int, index: int) -> int:
        return 1000 * source + 100 * target + index + 1

    def body(transport: ThreadTransport) -> dict[tuple[int, int], list[int]]:
        rank, chooser = transport.rank, random.Random(seed * 10 + transport.rank)
        peers = [peer for peer in range(world_size) if peer != rank]
        cells = {key: torch.full((2,), 10**6) for key in itertools.product(peers, range(per_edge))}
        ends = [(kind, peer) for kind in (Kind.SEND, Kind.RECV_COMBINE) for peer in peers for _ in range(per_edge)]
        chooser.shuffle(ends)
        posted: dict[tuple[Kind, int], int] = {}
        transfers = []
        for kind, peer in ends:
            index = posted[kind, peer] = posted.get((kind, peer), -1) + 1
            if kind is Kind.SEND:
                transfers.append(send(peer, torch.full((2,), value(rank, peer, index))))
            else:
                cell = cells[peer, index]
                transfers.append(recv_add(peer, cell))
        with exchange(transport) as opened:
            while transfers:
                count = chooser.randint(1, 4)
                opened.post(transfers[:count])
                del transfers[:count]
        return {key: cell.tolist() for key, cell in cells.items()}

    for rank, cells in enumerate(run_thread_ranks(body, world_size, timeout=30)):
        assert len(cells) == (world_size - 1) * per_edge
        for (peer, index), content in cells.items():
            assert content == [10**6 + value(peer, rank, index)] * 2


def test_misuse_is_refused() -> None:
    world = ThreadWorld(2)
    transport = world.transport(1)
    assert transport is world.transport(1)
    assert (transport.rank, transport.world_size, transport.name) == (1, 2, "thread")
    with pytest.raises(ValueError, match="no rank 2"):
        world.transport(2)
    header = Header(3, "all_reduce", "ring", "sum", "torch.float32", (1,), -1, 8)
    opened = transport.open(header, float("inf"))
    for peer in (-1, 1, 2):
        with pytest.raises(ValueError, match=f"rank 1 has no peer {peer}"):
            opened.post([send(peer, poison(1))])
    with pytest.raises(ValueError, match="needs a combine function"):
        opened.post([Transfer(Kind.RECV_COMBINE, 0, 0, poison(1))])
    with pytest.raises(ValueError, match="collective 3 after collective 3"):
        transport.open(header, float("inf"))
    with pytest.raises(TransportError, match="is not finished"):
        transport.open(make_header(4), float("inf"))
    world.transport(0).open(header, float("inf"))
    opened.finish()
    with pytest.raises(TransportError, match="is finished"):
        opened.post([send(0, poison(1))])
    assert world.transport(1).counters.messages_sent == 0

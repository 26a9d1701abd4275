"""Rings and worlds of threads against closed formulas: slow readers, late ranks, worlds side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from microddp.transport.base import Transport
from microddp.transport.thread import ThreadTransport, ThreadWorld, run_thread_ranks
from tests.transport.contract_tools import DEADLINE_S, exchange, neighbours, poison, recv, send
from tests.transport.thread_tools import asleep, no_thread_left, recv_add, start, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


def digits(rank: int) -> torch.Tensor:
    """Seven elements whose decimal digit ``rank`` counts this rank's contributions."""
    return torch.arange(1, 8, dtype=torch.int64).mul(10**rank)


def ring_all_reduce(transport: Transport, data: torch.Tensor, *, fused: bool, before: Callable[[], None]) -> None:
    """Scatter-reduce, then all-gather; chunks may be empty. ``before`` runs before every post of a receive."""
    rank, world_size = transport.rank, transport.world_size
    left, right = neighbours(transport)
    chunks = torch.tensor_split(data, world_size)
    with exchange(transport) as opened:
        for step in range(2 * (world_size - 1)):
            outgoing = chunks[(rank - step) % world_size]
            incoming = chunks[(rank - step - 1) % world_size]
            combines = step < world_size - 1
            slot = torch.full_like(incoming, 777)
            group = [send(right, outgoing, step)] if outgoing.numel() else []
            events = list(opened.post(group))
            before()
            if incoming.numel() and combines and fused:
                events += opened.post([recv_add(left, incoming, step)])
            elif incoming.numel():
                events += opened.post([recv(left, slot if combines else incoming, step)])
            opened.wait(events)
            if combines and not fused:
                incoming += slot


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("fused", [False, True], ids=["staged", "fused"])
def test_digit_probe_counts_every_rank_once(world_size: int, fused: bool) -> None:
    def body(transport: ThreadTransport) -> list[int]:
        data = digits(transport.rank)
        ring_all_reduce(transport, data, fused=fused, before=lambda: None)
        return data.tolist()

    ones = int("1" * world_size)
    assert run_thread_ranks(body, world_size, timeout=30) == [[ones * index for index in range(1, 8)]] * world_size


@pytest.mark.parametrize(("world_size", "slow"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 3)])
@pytest.mark.parametrize("fused", [False, True], ids=["staged", "fused"])
def test_digit_probe_with_a_slow_reader(world_size: int, slow: int, fused: bool) -> None:
    """The slow rank posts each receive only when its left neighbour sleeps in the wait for its send."""
    world = ThreadWorld(world_size)
    buffers = [digits(rank) for rank in range(world_size)]

    def delay() -> None:
        wait_until(lambda: asleep(world, (slow - 1) % world_size))

    def body(rank: int) -> None:
        before = delay if rank == slow else lambda: None
        ring_all_reduce(world.transport(rank), buffers[rank], fused=fused, before=before)

    for thread in start(*(partial(body, rank) for rank in range(world_size))):
        thread.join(DEADLINE_S)
    ones = int("1" * world_size)
    assert [buffer.tolist() for buffer in buffers] == [[ones * index for index in range(1, 8)]] * world_size


@pytest.mark.parametrize("world_size", range(2, 7))
def test_double_buffered_ring_twice_with_the_same_buffers(world_size: int) -> None:
    """Whole tensors forwarded through two alternating slots, the sum kept apart."""

    def body(transport: ThreadTransport) -> list[list[float]]:
        left, right = neighbours(transport)
        slots, results = [poison(3), poison(3)], []
        for _ in range(2):
            total = torch.ones(3) * (transport.rank + 1)
            slots[0].copy_(total)
            with exchange(transport) as opened:
                for step in range(world_size - 1):
                    source, target = slots[step % 2], slots[(step + 1) % 2]
                    opened.wait(opened.post([send(right, source, step), recv(left, target, step)]))
                    total += target
            results.append(total.tolist())
        return results

    expected = [[world_size * (world_size + 1) / 2] * 3] * 2
    assert run_thread_ranks(body, world_size, timeout=30) == [expected] * world_size


def sums_of_sizes(transport: Transport, factor: int) -> list[list[float]]:
    """Three collectives of different sizes in a row."""
    results = []
    for numel in (1, 5, 9):
        data = torch.full((numel,), float(factor * (transport.rank + 1)))
        ring_all_reduce(transport, data, fused=True, before=lambda: None)
        results.append(data.tolist())
    return results


def expected_sums(world_size: int, factor: int) -> list[list[float]]:
    return [[factor * world_size * (world_size + 1) / 2] * numel for numel in (1, 5, 9)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_ranks_that_join_one_after_another(order: tuple[int, ...]) -> None:
    """Each rank starts when the one before it already waits for the others."""
    world = ThreadWorld(4)
    results: dict[int, list[list[float]]] = {}
    threads = []

    def body(rank: int) -> None:
        results[rank] = sums_of_sizes(world.transport(rank), 1)

    for rank in order:
        threads += start(partial(body, rank))
        if rank != order[-1]:
            wait_until(partial(asleep, world, rank))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == dict.fromkeys(range(4), expected_sums(4, 1))


def test_two_worlds_at_once_and_a_hundred_repeats() -> None:
    def play(factor: int, outcome: list[bool]) -> None:
        for _ in range(50):
            results = run_thread_ranks(lambda transport: sums_of_sizes(transport, factor), 4, timeout=30)
            outcome.append(results == [expected_sums(4, factor)] * 4)

    with ExitStack() as stack:
        outcomes: list[list[bool]] = [[], []]
        for thread in start(lambda: play(1, outcomes[0]), lambda: play(1000, outcomes[1])):
            stack.callback(thread.join, 50)
    assert outcomes == [[True] * 50] * 2


def test_a_new_world_after_a_failed_one() -> None:
    def fails(transport: ThreadTransport) -> None:
        if transport.rank == 2:
            raise RuntimeError("lost")
        sums_of_sizes(transport, 1)

    for _ in range(10):
        with pytest.raises(RuntimeError, match="lost"):
            run_thread_ranks(fails, 4, timeout=30)
        results = run_thread_ranks(lambda transport: sums_of_sizes(transport, 3), 4, timeout=30)
        assert results == [expected_sums(4, 3)] * 4

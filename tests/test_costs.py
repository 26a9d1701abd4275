"""Bytes, messages and steps of real runs against closed formulas, for all-reduce and the other collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import microddp
from microddp import Communicator
from microddp.transport.base import Counters, Transport
from tests.matrix import ROWS, children, height
from tests.transport.gloo_pool import GlooPool, gloo_pools  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)

WORLD_SIZES = range(2, 10)
TIMEOUT_S = 60.0
UNIT_NUMEL = 4  # 16 bytes of float32


@dataclass(frozen=True)
class Cost:
    """What one rank sends and receives, in parts of which ``parts`` make up the tensor, and in how many steps."""

    sent: int
    received: int
    steps: int
    parts: int = 1


CostOf = Callable[[int, int, int], Cost]  # of rank, world_size, root


def _of_row(name: str) -> CostOf:
    row = ROWS[name]

    def cost(rank: int, n: int, root: int) -> Cost:
        messages = row.messages(rank, n)
        return Cost(messages, messages, row.steps(rank, n), n if row.is_chunked else 1)

    return cost


def _ring_pass(rank: int, n: int, root: int) -> Cost:
    return Cost(n - 1, n - 1, n - 1, n)


def _broadcast(rank: int, n: int, root: int) -> Cost:
    node = (rank - root) % n
    below, is_child = children(node, n), int(node > 0)
    return Cost(below, is_child, is_child + (below > 0))


def _reduce(rank: int, n: int, root: int) -> Cost:
    down = _broadcast(rank, n, root)
    return replace(down, sent=down.received, received=down.sent)


def _nothing(rank: int, n: int, root: int) -> Cost:
    return Cost(0, 0, 0)


@dataclass(frozen=True)
class Case:
    """A call on a tensor of ``numel`` elements in all, and its cost."""

    call: Callable[[Communicator, int, int], Any]  # comm, numel, root
    cost: CostOf
    rooted: bool = False


def _all_reduce(name: str) -> Case:
    row = ROWS[name]
    return Case(lambda c, numel, root: c.all_reduce(_ones(numel), "sum", row.algorithm, row.order), _of_row(name))


def _ones(numel: int) -> torch.Tensor:
    return torch.ones(numel)


CASES: dict[str, Case] = {
    **{name: _all_reduce(name) for name in ROWS},
    "reduce_scatter": Case(lambda c, numel, root: c.reduce_scatter(_ones(numel)), _ring_pass),
    "all_gather": Case(lambda c, numel, root: c.all_gather(_ones(numel // c.world_size)), _ring_pass),
    "broadcast": Case(lambda c, numel, root: c.broadcast(_ones(numel), root), _broadcast, rooted=True),
    "reduce": Case(lambda c, numel, root: c.reduce(_ones(numel), "sum", root), _reduce, rooted=True),
    "barrier": Case(lambda c, numel, root: c.barrier(), _nothing),
}


def count(comm: Communicator, name: str, numel: int, root: int) -> Counters:
    """The counters of this rank after one call."""
    comm.counters.reset()
    CASES[name].call(comm, numel, root)
    return replace(comm.counters)


def count_over(transport: Transport, calls: list[tuple[str, int, int]]) -> list[Counters]:
    """The same for several calls on a worker process."""
    with microddp.init() as comm:
        found = [count(comm, *each) for each in calls]
        comm.barrier()
    return found


def calls_for(world_size: int) -> Iterator[tuple[str, int, int]]:
    """(case, numel, root): for each case a size that divides by 16 n bytes; where chunks are cut, two that do not."""
    for name, case in CASES.items():
        for root in range(world_size if case.rooted else 1):
            yield name, 3 * UNIT_NUMEL * world_size, root
        if name in ROWS:
            yield name, 3 * UNIT_NUMEL * world_size + 1, 0
            yield name, 2 * UNIT_NUMEL * world_size - 5, 0


def check_counters(world_size: int, call: tuple[str, int, int], counted: list[Counters]) -> None:
    """All ranks' counters after one call."""
    name, numel, root = call
    nbytes = 4 * numel
    for rank, counters in enumerate(counted):
        cost = CASES[name].cost(rank, world_size, root)
        off_sent = counters.bytes_sent - cost.sent * nbytes / cost.parts
        off_received = counters.bytes_received - cost.received * nbytes / cost.parts
        is_exact = cost.parts == 1 or nbytes % (16 * world_size) == 0
        for off, messages in ((off_sent, cost.sent), (off_received, cost.received)):
            assert abs(off) <= (0 if is_exact else 16 * messages), (call, rank, counters)
        # One message a chunk, as tensors this small are not sliced.
        assert (counters.messages_sent, counters.messages_received) == (cost.sent, cost.received), (call, rank)
        assert counters.steps == cost.steps, (call, rank, counters)
        assert counters.collectives == 1
    assert sum(each.bytes_sent for each in counted) == sum(each.bytes_received for each in counted)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_counters_of_threads(world_size: int) -> None:
    calls = list(calls_for(world_size))

    def body(comm: Communicator) -> list[Counters]:
        return [count(comm, *each) for each in calls]

    by_rank = microddp.run_threads(body, world_size, timeout=TIMEOUT_S)
    for number, call in enumerate(calls):
        check_counters(world_size, call, [each[number] for each in by_rank])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_counters_of_gloo(gloo_pools: Callable[[int], GlooPool], world_size: int) -> None:  # noqa: F811
    calls = [each for each in calls_for(world_size) if each[0] != "barrier"]
    by_rank = gloo_pools(world_size).run(count_over, calls)
    for number, call in enumerate(calls):
        check_counters(world_size, call, [each[number] for each in by_rank])


@pytest.mark.parametrize("world_size", range(2, 65))
def test_steps_of_schedules(world_size: int) -> None:
    for name, row in ROWS.items():
        schedule = microddp.schedule(row.algorithm or "", world_size, order=row.order)
        steps = max(schedule.num_steps(rank) for rank in range(world_size))
        assert steps == row.length(world_size), name
    for name, length in [("reduce_scatter", world_size - 1), ("all_gather", world_size - 1)]:
        assert microddp.schedule(name, world_size).num_steps(0) == length
    for name in ("broadcast", "reduce"):
        assert microddp.schedule(name, world_size).num_steps(0) == height(world_size)


def test_table_of_the_tree() -> None:
    """Seven ranks, in all: the leaves 2S each, the root 4S, the inner ranks 6S."""

    def body(comm: Communicator) -> int:
        comm.all_reduce(torch.ones(256), algorithm="tree")
        return (comm.counters.bytes_sent + comm.counters.bytes_received) // 1024

    assert microddp.run_threads(body, 7, timeout=TIMEOUT_S) == [4, 6, 6, 2, 2, 2, 2]

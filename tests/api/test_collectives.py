"""reduce_scatter, all_gather, broadcast, reduce and barrier."""

from __future__ import annotations

import threading

import pytest
import torch

from microddp import Communicator
from tests.api.tools import outcomes, run

pytestmark = pytest.mark.timeout(60)

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
TAILS: list[tuple[int, ...]] = [(), (3,), (0,), (2, 5)]


def contribution(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Integers that name their rank in a decimal digit each."""
    numel = torch.Size(shape).numel()
    digits = torch.arange(numel).reshape(shape) % 9 + 1
    return torch.mul(digits, 10**rank)


@world_sizes
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("is_dense", [True, False])
def test_reduce_scatter(world_size: int, tail: tuple[int, ...], is_dense: bool) -> None:
    shape = (2 * world_size, *tail)

    def body(comm: Communicator) -> None:
        x = contribution(comm.rank, shape)
        x = x if is_dense else x.repeat_interleave(2, 0)[::2]
        before = x.clone()
        whole = sum(contribution(rank, shape) for rank in range(world_size))
        assert isinstance(whole, torch.Tensor)
        wanted = whole[2 * comm.rank : 2 * comm.rank + 2]
        assert torch.equal(comm.reduce_scatter(x), wanted)
        room = torch.full((4, *tail), -1)
        out = room[:2] if is_dense else room[::2]
        assert comm.reduce_scatter(x, out=out) is out
        assert torch.equal(out, wanted)
        assert bool(((room[2:] if is_dense else room[1::2]) == -1).all())
        assert torch.equal(
            comm.reduce_scatter(x, op="max"),
            contribution(world_size - 1, shape)[: 2 * world_size][2 * comm.rank : 2 * comm.rank + 2],
        )
        assert torch.equal(x, before)

    run(body, world_size)


@world_sizes
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("is_dense", [True, False])
def test_all_gather(world_size: int, tail: tuple[int, ...], is_dense: bool) -> None:
    def body(comm: Communicator) -> None:
        x = contribution(comm.rank, (3, *tail))
        x = x if is_dense else x.repeat_interleave(2, 0)[::2]
        before = x.clone()
        wanted = torch.cat([contribution(rank, (3, *tail)) for rank in range(world_size)])
        assert torch.equal(comm.all_gather(x), wanted)
        room = torch.full((6 * world_size, *tail), -1)
        out = room[: 3 * world_size] if is_dense else room[::2]
        assert comm.all_gather(x, out=out) is out
        assert torch.equal(out, wanted)
        assert torch.equal(x, before)
        assert comm.all_gather(torch.tensor(comm.rank)).tolist() == list(range(world_size))

    run(body, world_size)


@world_sizes
def test_broadcast_and_reduce_from_and_to_every_root(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        for root in range(world_size):
            for shape in [(), (1,), (7,), (0,), (3, 5)]:
                x = contribution(comm.rank, shape)
                assert comm.broadcast(x, root) is x
                assert torch.equal(x, contribution(root, shape))
                assert (x._version > 0) is (comm.rank != root and x.numel() > 0)
                x = contribution(comm.rank, shape).t() if len(shape) == 2 else contribution(comm.rank, shape)
                before = x.clone()
                assert comm.reduce(x, "sum", root) is x
                whole = sum(contribution(rank, shape) for rank in range(world_size))
                assert isinstance(whole, torch.Tensor)
                wanted = (whole.t() if len(shape) == 2 else whole) if comm.rank == root else before
                assert torch.equal(x, wanted), (root, shape)

    run(body, world_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_avg(dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> None:
        x = torch.full((4,), 40000.0 if dtype is torch.float16 else comm.rank + 1.0).to(dtype)
        wanted = 40000.0 if dtype is torch.float16 else 2.5
        wanted = float(torch.tensor(wanted).to(dtype))
        assert comm.reduce_scatter(x, op="avg").tolist() == [wanted]
        comm.reduce(x, op="avg", root=2)
        if comm.rank == 2:
            assert x.tolist() == [wanted] * 4

    run(body, 4)


def test_barrier_lets_nobody_pass_before_the_last() -> None:
    is_here = threading.Event()
    passed: list[int] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            assert not passed
            is_here.set()
        comm.barrier()
        assert is_here.is_set()
        passed.append(comm.rank)
        assert comm.counters.bytes_sent == 0

    run(body, 4)
    assert sorted(passed) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(5,), (), (1, 4)])
def test_reduce_scatter_wants_equal_parts(shape: tuple[int, ...]) -> None:
    for error in outcomes(lambda comm: comm.reduce_scatter(torch.ones(shape)), 2):
        assert type(error) is ValueError
        assert "2 equal parts" in str(error)

"""Operators of users and those of several lanes, over real rings and trees, on threads and on processes over Gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import microddp
from microddp import Communicator, premul_sum
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks
from tests import user_operators
from tests.transport.gloo_pool import GlooPool, gloo_pools  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)

ALGORITHMS = ("naive", "tree", "ring", "direct")
NUMEL = 1003
TIMEOUT_S = 60.0
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Array = np.ndarray[Any, np.dtype[Any]]
Results = dict[Any, tuple[torch.Tensor, ...]]


def contribution(rank: int, salt: int = 0, numel: int = NUMEL) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([rank, salt]).standard_normal(numel))


def stacked(world_size: int, salt: int = 0, dtype: torch.dtype = torch.float64, numel: int = NUMEL) -> Array:
    """All ranks' contributions, rounded to ``dtype``, exactly: (world_size, numel)."""
    return np.stack([contribution(rank, salt, numel).to(dtype).double().numpy() for rank in range(world_size)])


def users_operators(transport: Transport, is_process: bool = False) -> Results:
    """On one rank: what each of the user's operators gives, by operator, algorithm and dtype.

    A process makes a transport of its own: closing the one that it was given would end it for the next test.
    """
    found: Results = {}
    options: dict[str, Any] = {"timeout": TIMEOUT_S, "slice_nbytes": 512}
    with microddp.init(**options) if is_process else Communicator(transport, **options) as comm:
        rank = comm.rank
        for algorithm in ALGORITHMS:
            for dtype in FLOATS:
                x = contribution(rank).to(dtype)
                found["absmin", algorithm, dtype] = (comm.all_reduce(x, user_operators.absmin, algorithm),)
            pair = contribution(rank).float(), contribution(rank, 1).half()
            found["bounds", algorithm] = comm.all_reduce(pair, "bounds", algorithm)
            values = contribution(rank).float()
            three = torch.full_like(values, rank + 1.0), values.clone(), values.square().double()
            found["moments", algorithm] = comm.all_reduce(three, user_operators.moments, algorithm)
        for name, order in (("naive", None), ("direct", None), ("full_ring", "rank"), (None, None)):
            four = tuple(contribution(rank, salt) for salt in range(4))
            found["matrix_product", name] = comm.all_reduce(four, "matrix_product", name, order)
        comm.barrier()
    return found


def check_users_operators(ranks: list[Results]) -> None:
    world_size = len(ranks)
    for rank, found in enumerate(ranks):
        for key, lanes in found.items():
            for mine, theirs in zip(lanes, ranks[0][key]):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), f"rank {rank}, {key}"
    for (name, *rest), lanes in ranks[0].items():
        if name == "absmin":
            wanted: list[Array] = [np.abs(stacked(world_size, 0, rest[1])).min(axis=0)]
            bound = 0.0
        elif name == "bounds":
            low, high = stacked(world_size, 0, torch.float32), stacked(world_size, 1, torch.float16)
            wanted, bound = [low.min(axis=0), high.max(axis=0)], 0.0
        elif name == "moments":
            values, count = stacked(world_size, 0, torch.float32), world_size * (world_size + 1) / 2
            squares = (values**2).sum(axis=0) / count
            wanted, bound = [np.full(NUMEL, count), values.sum(axis=0) / count, squares], 2e-6
        else:
            matrices = [stacked(world_size, salt).reshape(world_size, NUMEL) for salt in range(4)]
            product = np.array([np.stack([each[0] for each in matrices], -1).reshape(-1, 2, 2)])[0]
            for rank in range(1, world_size):
                product = product @ np.stack([each[rank] for each in matrices], -1).reshape(-1, 2, 2)
            wanted, bound = list(product.reshape(-1, 4).T), 1e-12
        for lane, exact in zip(lanes, wanted, strict=True):
            error = np.abs(lane.double().numpy() - exact).max()
            assert error <= bound * max(1.0, np.abs(exact).max()), f"{name} {rest}: off by {error}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_a_users_operators_on_threads(world_size: int) -> None:
    if world_size == 1:  # nothing is combined, and the fold of one contribution is finished all the same
        (found,) = run_thread_ranks(lambda transport: users_operators(transport), 1)
        assert torch.equal(found["absmin", "ring", torch.float32][0], contribution(0).float())
    else:
        check_users_operators(run_thread_ranks(users_operators, world_size, timeout=TIMEOUT_S))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_users_operators_over_gloo(world_size: int, gloo_pools: Callable[[int], GlooPool]) -> None:  # noqa: F811
    check_users_operators(gloo_pools(world_size).run(users_operators, True))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "full_ring"])
def test_the_order_of_a_product_is_not_given_up(algorithm: str) -> None:
    def body(transport: Transport) -> str:
        with Communicator(transport, timeout=TIMEOUT_S) as comm:
            four = tuple(contribution(comm.rank, salt) for salt in range(4))
            with pytest.raises(ValueError, match="not commutative") as raised:
                comm.all_reduce(four, "matrix_product", algorithm)
            comm.barrier()
            return str(raised.value)

    for rank, text in enumerate(run_thread_ranks(body, 3, timeout=TIMEOUT_S)):
        assert f"rank {rank} of 3" in text and algorithm in text
        assert "naive, direct, full_ring with order='rank'" in text


def _scores(rank: int) -> torch.Tensor:
    """Few different values, so that most places tie, NaN among them."""
    random = np.random.default_rng(rank)
    values = random.integers(0, 3, (500, 6)).astype(np.float32)
    values[random.random((500, 6)) < 0.05] = np.nan
    return torch.from_numpy(values)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_index_is_that_of_the_concatenation(name: str, algorithm: str) -> None:
    """500 rows of 4 times 6 columns: each rank looks through its columns, ranks hold them in any order."""
    world_size = 4

    def body(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        place = (transport.rank + 3) % world_size
        with Communicator(transport, timeout=TIMEOUT_S) as comm:
            mine = _scores(place)
            index = getattr(torch, name)(mine, dim=1)
            value = mine.gather(1, index[:, None])[:, 0]
            return comm.all_reduce((value, index + 6 * place), name, algorithm)

    columns = torch.cat([_scores(place) for place in range(world_size)], dim=1)
    wanted = getattr(torch, name)(columns, dim=1)
    assert columns.isnan().any() and len(wanted.unique()) > 6
    for value, index in run_thread_ranks(body, world_size, timeout=TIMEOUT_S):
        assert torch.equal(index, wanted)
        assert torch.equal(value.nan_to_num(9.0), columns.gather(1, wanted[:, None])[:, 0].nan_to_num(9.0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("counts", [(5, 0, 3, 1, 40), (0, 7), (0, 0, 2), (1, 1, 1)])
def test_welford_is_var_mean_of_the_concatenation(counts: tuple[int, ...], algorithm: str) -> None:
    columns = 37

    def values(rank: int) -> torch.Tensor:
        return 100.0 + contribution(rank, 5, counts[rank] * columns).view(counts[rank], columns)

    def body(transport: Transport) -> tuple[torch.Tensor, ...]:
        with Communicator(transport, timeout=TIMEOUT_S, slice_nbytes=128) as comm:
            mine = values(comm.rank)
            count = torch.full((columns,), float(len(mine)), dtype=torch.float64)
            mean = mine.mean(0) if len(mine) else torch.zeros(columns, dtype=torch.float64)
            return comm.all_reduce((mean, ((mine - mean) ** 2).sum(0), count), "welford", algorithm)

    var, mean = torch.var_mean(torch.cat([values(rank) for rank in range(len(counts))]), dim=0)
    for found in run_thread_ranks(body, len(counts), timeout=TIMEOUT_S):
        assert torch.equal(found[2], torch.full((columns,), float(sum(counts)), dtype=torch.float64))
        torch.testing.assert_close(found[0], mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1] / (sum(counts) - 1), var, rtol=1e-6, atol=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_partial_attention_merges_into_attention_over_all_keys(algorithm: str) -> None:
    world_size, rows, keys, depth = 4, 9, 11, 40

    def tensors(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys_here = 0 if rank == 2 else keys  # one rank holds no keys
        return contribution(rank, 1, keys_here * depth).view(-1, depth), contribution(rank, 2, keys_here * depth).view(
            -1, depth
        )

    query = contribution(99, 0, rows * depth).view(rows, depth)

    def body(transport: Transport) -> tuple[torch.Tensor, ...]:
        with Communicator(transport, timeout=TIMEOUT_S, slice_nbytes=1024) as comm:
            key, value = tensors(comm.rank)
            scores = (query @ key.T / math.sqrt(depth)).float()
            if not scores.shape[1]:
                empty = torch.full((rows,), -math.inf), torch.zeros(rows), torch.zeros(rows, depth)
                return comm.all_reduce(empty, "softmax_merge", algorithm)
            top = scores.max(dim=1).values
            weights = (scores - top[:, None]).exp()
            total = weights.sum(dim=1)
            out = (weights / total[:, None]) @ value.float()
            return comm.all_reduce((top, total, out), "softmax_merge", algorithm)

    key, value = (torch.cat(each) for each in zip(*(tensors(rank) for rank in range(world_size))))
    wanted = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
    for _, _, out in run_thread_ranks(body, world_size, timeout=TIMEOUT_S):
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def test_each_rank_scales_its_own_contribution() -> None:
    def body(transport: Transport) -> list[torch.Tensor]:
        with Communicator(transport, timeout=TIMEOUT_S) as comm:
            x = contribution(comm.rank)
            kept = x.clone()
            out = comm.all_reduce(x, premul_sum(comm.rank + 0.5), "ring", out=torch.empty_like(x))
            assert torch.equal(x, kept)
            root = comm.reduce(x.clone(), premul_sum(2.0), root=1)
            return [out, root, comm.reduce_scatter(x[:1002], premul_sum(-1.0))]

    exact = stacked(3)
    found = run_thread_ranks(body, 3, timeout=TIMEOUT_S)
    weighted = (exact * np.array([[0.5], [1.5], [2.5]])).sum(axis=0)
    for rank, (out, _, part) in enumerate(found):
        np.testing.assert_allclose(out.numpy(), weighted, rtol=0, atol=1e-13)
        scattered = -exact[:, :1002].sum(axis=0)[rank * 334 : (rank + 1) * 334]
        np.testing.assert_allclose(part.numpy(), scattered, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found[1][1].numpy(), 2 * exact.sum(axis=0), rtol=0, atol=1e-13)
    assert torch.equal(found[0][1], contribution(0)), "reduce leaves the tensors of other ranks as they are"


def test_the_same_function_with_other_laws_is_told_apart() -> None:
    """Ranks whose operators of one name differ do not combine: each hears of both fingerprints."""
    from dataclasses import replace

    from microddp import MismatchError, TransportError

    def body(transport: Transport) -> str:
        op = user_operators.absmin
        if transport.rank:
            op = replace(op, fingerprint="0badf00d")
        with Communicator(transport, timeout=TIMEOUT_S) as comm, pytest.raises(TransportError) as raised:
            comm.all_reduce(torch.ones(3), op, "ring")
        return str(raised.value)

    texts = run_thread_ranks(body, 2, timeout=TIMEOUT_S)
    assert any("0badf00d" in text and user_operators.absmin.fingerprint in text for text in texts), texts
    assert issubclass(MismatchError, TransportError)

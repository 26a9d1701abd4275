"""Algorithms of the user's own, and what is said when one is wrong or unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from microddp.errors import ScheduleError
from microddp.schedule import (
    OWN,
    Fold,
    Recv,
    Send,
    Step,
    algorithm,
    algorithm_names,
    everyone,
    find_algorithm,
    only,
    schedule,
    unregister,
)
from microddp.schedule.ir import cyclic, iter_ranks, num_ranks
from tests.schedule.reference import is_right

BUILT_IN = ("naive", "reduce", "broadcast", "tree", "ring", "reduce_scatter", "all_gather", "full_ring", "direct")


@pytest.fixture(autouse=True)
def registry_as_before() -> Iterator[None]:
    before = algorithm_names()
    yield
    for name in set(algorithm_names()) - set(before):
        unregister(name)


def doubling(rank: int, world_size: int) -> Iterator[Step]:
    """Recursive doubling: at distance 1, 2, 4 … both partners hold the sum of a block, and exchange."""
    distance = 1
    while distance < world_size:
        peer = rank ^ distance
        theirs = peer // distance * distance
        arrival = Recv(peer, 0, (range(theirs, theirs + distance),), key=distance)
        yield Step((Send(peer, 0), arrival), folds=(Fold(0, (OWN, distance) if rank < peer else (distance, OWN)),))
        distance *= 2


def test_recursive_doubling_in_ten_lines() -> None:
    assert algorithm("doubling", rank_order=False)(doubling) is doubling
    assert algorithm_names()[-1] == "doubling" and "doubling" in algorithm_names("all_reduce")
    for world_size in (1, 2, 4, 8, 16, 64):
        each = schedule("doubling", world_size)
        proof = each.verify()
        assert proof.num_steps == world_size.bit_length() - 1
        assert proof.same_bits and each.bytes_sent(0, 100) == 100 * proof.num_steps
        assert is_right(each)
    assert schedule("doubling", 4).verify().order(0, 3) == "((x0∘x1)∘(x2∘x3))"
    assert schedule("doubling", 2).verify().rank_order and not schedule("doubling", 4).verify().rank_order
    assert schedule("doubling", 2).render().split()[-7:] == ["0", "c0->1", "c0<-1", "fold", "c0->0", "c0.k1<-0", "fold"]


def test_recursive_doubling_of_three_ranks_is_refused() -> None:
    algorithm("doubling")(doubling)
    with pytest.raises(ScheduleError, match="doubling over 3 ranks: rank 2, step 0: peer 3 is not another rank of 3"):
        schedule("doubling", 3).verify()


def test_wrong_algorithm_is_caught() -> None:
    @algorithm("forgetful")
    def forgetful(rank: int, world_size: int) -> Iterator[Step]:
        """Everyone sends to the right once: right for two ranks only."""
        left = (rank - 1) % world_size
        transfers = Send((rank + 1) % world_size, 0), Recv(left, 0, only(left), key=left)
        yield Step(transfers, folds=(Fold(0, (OWN, left) if rank < left else (left, OWN)),))

    assert schedule("forgetful", 2).verify().rank_order
    with pytest.raises(ScheduleError, match=r"over 3 ranks: rank 0, step 1: ends with chunk 0 holding \[0, 2\]"):
        schedule("forgetful", 3).verify()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"rank_order": True}, "dishonest over 3 ranks: declared rank_order, but folds in another order"),
        ({"same_bits": True}, "dishonest over 3 ranks: declared same_bits, but ranks end with different orders"),
    ],
)
def test_declared_facts_are_held_against_the_proof(facts: dict[str, Any], text: str) -> None:
    full_ring = find_algorithm("full_ring")
    algorithm("dishonest", **{"same_bits": False, **facts})(full_ring.steps)
    with pytest.raises(ScheduleError, match=text):
        schedule("dishonest", 3).verify()


def test_names_are_taken_once_and_freed() -> None:
    register = algorithm("mine", num_chunks="world_size")
    register(doubling)
    with pytest.raises(ValueError, match=r"'mine' is registered already; unregister\('mine'\) frees the name"):
        register(doubling)
    algorithm("mine", rank_order=True)(doubling)  # a variant
    with pytest.raises(ValueError, match="registered already"):
        algorithm("mine", rank_order=True)(doubling)
    assert find_algorithm("mine", order="rank").rank_order and not find_algorithm("mine").rank_order
    unregister("mine")
    register(doubling)
    with pytest.raises(ValueError, match="no algorithm 'yours' to unregister"):
        unregister("yours")
    with pytest.raises(ValueError, match="algorithm 'ring' is registered already"):
        algorithm("ring", collective="broadcast", rank_order=True)(doubling)


def test_built_in_names() -> None:
    assert algorithm_names() == BUILT_IN
    assert algorithm_names("all_reduce") == ("naive", "tree", "ring", "full_ring", "direct")
    assert algorithm_names("reduce") == ("reduce",)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"unknown algorithm 'rign'; known: {', '.join(BUILT_IN)}$"):
        schedule("rign", 4)
    with pytest.raises(ValueError, match="unknown algorithm 'ring' for broadcast; known: broadcast$"):
        find_algorithm("ring", collective="broadcast")
    with pytest.raises(ValueError, match="unknown algorithm None"):
        schedule(None, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'ring' does not combine in rank order; these do: naive, full_ring, direct$"):
        schedule("ring", 4, order="rank")
    with pytest.raises(ValueError, match="unknown order 'ring'; it is None or 'rank'"):
        schedule("naive", 4, order="ring")
    with pytest.raises(ValueError, match="unknown collective 'scan'; known: all_reduce, reduce_scatter"):
        algorithm("mine", collective="scan")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_chunks", [0, -1, "ranks", 2.0])
def test_number_of_chunks_must_make_sense(num_chunks: Any) -> None:
    with pytest.raises(ValueError, match="num_chunks must be a positive int or 'world_size', not"):
        algorithm("mine", num_chunks=num_chunks)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (("ring", 2.0), {}, TypeError, "world_size must be an int, not float"),
        (("ring", True), {}, TypeError, "world_size must be an int, not bool"),
        (("ring", "4"), {}, TypeError, "world_size must be an int, not str"),
        (("reduce", 4), {"root": None}, TypeError, "root must be an int, not NoneType"),
        (("ring", 0), {}, ValueError, "world_size must be at least 1, not 0"),
        (("ring", -3), {}, ValueError, "world_size must be at least 1, not -3"),
        (("reduce", 4), {"root": 4}, ValueError, "root 4 is not one of 4 ranks"),
        (("reduce", 4), {"root": -1}, ValueError, "root -1 is not one of 4 ranks"),
        (("ring", 4), {"root": 1}, ValueError, r"ring \(all_reduce\) has no root"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        schedule(*arguments, **options)


@pytest.mark.parametrize("rank", [-1, 4])
def test_steps_of_a_rank_that_is_not_there(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of 4"):
        schedule("ring", 4).steps(rank)


def test_sets_of_ranks() -> None:
    for world_size in range(1, 6):
        for start in range(-2, 2 * world_size):
            for count in range(world_size + 1):
                ranks = cyclic(start, count, world_size)
                assert list(iter_ranks(ranks)) == [(start + each) % world_size for each in range(count)]
                assert num_ranks(ranks) == count
    assert list(iter_ranks(everyone(3))) == [0, 1, 2] and list(iter_ranks(only(7))) == [7]

"""Every algorithm is proved for every world size up to 64, and its counts equal closed formulas written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from microddp.schedule import Schedule, schedule
from tests.schedule.reference import every_schedule, is_right, label, play

MAX_WORLD_SIZE = 64

# name -> steps of the longest rank.
STEPS: dict[str, Callable[[int], int]] = {
    "naive": lambda n: 2 * (n - 1),
    "tree": lambda n: 2 * math.floor(math.log2(n)),
    "ring": lambda n: 2 * (n - 1),
    "full_ring": lambda n: n - 1,
    "direct": lambda n: 2 if n > 1 else 0,
    "reduce_scatter": lambda n: n - 1,
    "all_gather": lambda n: n - 1,
    "broadcast": lambda n: math.floor(math.log2(n)),
    "reduce": lambda n: math.floor(math.log2(n)),
}


def num_children(node: int, world_size: int) -> int:
    return len([child for child in (2 * node + 1, 2 * node + 2) if child < world_size])


def whole_tensors(each: Schedule, rank: int) -> tuple[int, int]:
    """(sent, received) in multiples of S/n."""
    n = each.world_size
    node = (rank - each.root) % n
    below, above = num_children(node, n), int(node != 0)
    root_or_leaf = n - 1 if rank == 0 else 1
    return {
        "naive": (root_or_leaf * n, root_or_leaf * n),
        "tree": ((below + above) * n, (below + above) * n),
        "ring": (2 * (n - 1), 2 * (n - 1)),
        "full_ring": ((n - 1) * n, (n - 1) * n),
        "direct": (2 * (n - 1), 2 * (n - 1)),
        "reduce_scatter": (n - 1, n - 1),
        "all_gather": (n - 1, n - 1),
        "broadcast": (below * n, above * n),
        "reduce": (above * n, below * n),
    }[each.algorithm]


def num_messages(each: Schedule) -> int:
    n = each.world_size
    per_rank = {"ring": 2 * (n - 1), "full_ring": n - 1, "direct": 2 * (n - 1)}
    per_rank |= {"reduce_scatter": n - 1, "all_gather": n - 1}
    in_all = {"naive": 2 * (n - 1), "tree": 2 * (n - 1), "broadcast": n - 1, "reduce": n - 1}
    return in_all.get(each.algorithm, n * per_rank.get(each.algorithm, 0))


@pytest.mark.parametrize("world_size", range(1, MAX_WORLD_SIZE + 1))
def test_proved_with_the_right_facts(world_size: int) -> None:
    seen = 0
    for each in every_schedule(world_size, roots=sorted({0, world_size // 3, world_size - 1})):
        proof = each.verify()
        name, in_rank_order = each.algorithm, each.entry.rank_order
        assert (proof.algorithm, proof.world_size, proof.collective) == (name, world_size, each.collective)
        assert proof.num_steps == STEPS[name](world_size) == max(map(each.num_steps, range(world_size)))
        assert proof.num_messages == num_messages(each), label(each)
        # Symbols keep x0+x1 and x1+x0 apart, so that full_ring of two ranks does not count as the same bits either.
        assert proof.same_bits == (name != "full_ring" or in_rank_order or world_size == 1), label(each)
        always = name in ("naive", "direct", "all_gather", "broadcast") or in_rank_order
        by_chance = {1: True, 2: name in ("tree", "reduce") and each.root == 0}
        # In a tree of up to three ranks the root folds itself, then its children, which are ranks 1 and 2.
        by_chance[3] = by_chance[2]
        assert proof.rank_order == (always or by_chance.get(world_size, False)), label(each)
        seen += 1
    assert seen >= 10


@pytest.mark.parametrize("world_size", range(1, MAX_WORLD_SIZE + 1))
def test_bytes_are_those_of_the_formulas(world_size: int) -> None:
    for each in every_schedule(world_size, roots=sorted({0, world_size - 1})):
        divisible = 16 * world_size * 3
        ranks = range(world_size) if world_size <= 9 else sorted({0, 1, world_size // 2, world_size - 1})
        for rank in ranks:
            counted = each.bytes_sent(rank, divisible), each.bytes_received(rank, divisible)
            shares = whole_tensors(each, rank)
            assert counted == tuple(share * divisible // world_size for share in shares), label(each)
            check_uneven(each, rank, shares)


def check_uneven(each: Schedule, rank: int, shares: tuple[int, int]) -> None:
    """At sizes that do not divide: within 16 bytes a chunk."""
    if each.collective in ("reduce_scatter", "all_gather"):
        return  # their chunks are tensors of one size: the total always divides
    few = (17, 4_000_003)
    many = (0, 1, 15, *few, 16 * each.world_size - 1, 16 * each.world_size + 1)
    for nbytes in many if each.world_size <= 9 else few:
        counted = each.bytes_sent(rank, nbytes), each.bytes_received(rank, nbytes)
        for count, share in zip(counted, shares):
            num_chunks = share if each.num_chunks > 1 else 0  # a whole tensor is exact
            assert abs(count - share * nbytes / each.world_size) <= 16 * num_chunks, (label(each), rank, nbytes)


def test_bytes_in_all_balance() -> None:
    for world_size in (1, 2, 3, 7, 8):
        for each in every_schedule(world_size):
            for nbytes in (0, 5, 100, 16 * world_size):
                if each.collective in ("reduce_scatter", "all_gather"):
                    nbytes *= world_size
                ranks = range(world_size)
                sent = sum(each.bytes_sent(rank, nbytes) for rank in ranks)
                assert sent == sum(each.bytes_received(rank, nbytes) for rank in ranks)


def test_the_tree_s_bounds() -> None:
    """Leaf 2S in all, root up to 4S, inner nodes at most 6S."""
    nbytes, each = 160, schedule("tree", 15)
    in_all = [each.bytes_sent(rank, nbytes) + each.bytes_received(rank, nbytes) for rank in range(15)]
    assert in_all == [4 * nbytes] + [6 * nbytes] * 6 + [2 * nbytes] * 8


ORDERS = [
    ("naive", 2, None, 0, ["(x0∘x1)"]),
    ("naive", 4, None, 3, ["(((x0∘x1)∘x2)∘x3)"]),
    ("direct", 4, None, 2, ["(x0∘x1∘x2∘x3)"] * 4),
    ("full_ring", 4, "rank", 1, ["(x0∘x1∘x2∘x3)"]),
    # The worked example: after step 0 rank 0 holds T0+T2, after step 1 T0+T2+T1.
    ("full_ring", 3, None, 0, ["((x0∘x2)∘x1)"]),
    ("full_ring", 3, None, 1, ["((x1∘x0)∘x2)"]),
    ("full_ring", 3, None, 2, ["((x2∘x1)∘x0)"]),
    # Chunk c starts at rank c+1 and ends at rank c.
    ("ring", 2, None, 0, ["(x1∘x0)", "(x0∘x1)"]),
    ("ring", 3, None, 2, ["((x1∘x2)∘x0)", "((x2∘x0)∘x1)", "((x0∘x1)∘x2)"]),
    ("tree", 3, None, 1, ["(x0∘x1∘x2)"]),
    ("tree", 4, None, 3, ["(x0∘(x1∘x3)∘x2)"]),
    ("tree", 7, None, 0, ["(x0∘(x1∘x3∘x4)∘(x2∘x5∘x6))"]),
]


@pytest.mark.parametrize(("name", "world_size", "order", "rank", "wanted"), ORDERS)
def test_order_of_combination(name: str, world_size: int, order: str | None, rank: int, wanted: Sequence[str]) -> None:
    each = schedule(name, world_size, order=order)
    proof = each.verify()
    assert [proof.order(chunk, rank) for chunk in range(each.num_chunks)] == wanted


def test_order_of_rooted_and_partial_collectives() -> None:
    assert schedule("reduce", 4, root=2).verify().order(0, 2) == "(x2∘(x3∘x1)∘x0)"
    assert schedule("broadcast", 5, root=3).verify().order(0, 1) == "x3"
    assert schedule("reduce_scatter", 3).verify().places() == ((0, 0), (1, 1), (2, 2))
    assert schedule("all_gather", 3).verify().order(2, 0) == "x2"
    assert schedule("reduce", 4, root=2).verify().places() == ((2, 0),)


@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_reference_interpreter_agrees(world_size: int) -> None:
    """Independent of the verifier: real sums, and the same order of combination as the proof's text says."""
    for each in every_schedule(world_size, roots=range(world_size)):
        assert is_right(each), label(each)
        proof = each.verify()
        own = play(each, [f"x{rank}" for rank in range(world_size)], lambda left, right: f"{left}∘{right}")
        for rank, chunk in proof.places():
            assert own[rank][chunk] == proof.order(chunk, rank).replace("(", "").replace(")", ""), label(each)

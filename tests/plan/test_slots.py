"""Staging: as many buffers, and as large, as the design's table says; two slots that alternate."""

from __future__ import annotations

from itertools import pairwise

import pytest

from microddp.plan import LoweringConfig, Plan, lower
from microddp.plan.instructions import Combine, Copy, Recv, Send
from microddp.schedule import schedule

SLICE = 8  # elements


def plan_of(name: str, world_size: int, rank: int, order: str | None = None, **options: bool) -> Plan:
    numel = 5 * SLICE * world_size  # five slices a chunk, or more
    return lower(schedule(name, world_size, order=order), rank, numel, 4, LoweringConfig(4 * SLICE, **options))


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("name", "order", "slots"),
    [
        ("naive", None, lambda n, rank: 2 if rank == 0 else 0),  # only the root receives what it must combine
        ("tree", None, lambda n, rank: 2 if 2 * rank + 1 < n else 0),
        ("ring", None, lambda n, rank: 2),
        ("full_ring", None, lambda n, rank: 2),
        ("full_ring", "rank", lambda n, rank: max(2, n - 1)),
        ("direct", None, lambda n, rank: max(2, n - 1)),
        ("reduce_scatter", None, lambda n, rank: 2),
        ("all_gather", None, lambda n, rank: 0),
        ("broadcast", None, lambda n, rank: 0),
    ],
)
def test_slots_are_those_of_the_table(name: str, order: str | None, slots: object, world_size: int) -> None:
    assert callable(slots)
    for rank in range(world_size):
        plan = plan_of(name, world_size, rank, order)
        wanted = slots(world_size, rank)
        assert [each.name for each in plan.buffers] == ["data", *"ABCDEFGH"[:wanted]]
        assert [each.numel for each in plan.buffers[1:]] == [SLICE] * wanted
        assert plan.staging_nbytes(4) == 4 * SLICE * wanted and not any(each.wide for each in plan.buffers)


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_folds_that_take_several_steps_have_a_wide_accumulator(world_size: int) -> None:
    """Naive, 16-bit types: two slices and one more in float32."""
    plan = plan_of("naive", world_size, 0, wide=True)
    assert [(each.name, each.numel, each.wide) for each in plan.buffers[1:]] == [
        ("A", SLICE, False),
        ("B", SLICE, False),
        ("acc", SLICE, True),
    ]
    assert plan.staging_nbytes(wide_itemsize=8) == 2 * SLICE * 4 + SLICE * 8
    for name, order in (("direct", None), ("full_ring", "rank"), ("ring", None), ("tree", None), ("full_ring", None)):
        assert not any(each.wide for each in plan_of(name, world_size, 0, order, wide=True).buffers)


def test_staging_does_not_grow_with_the_tensor() -> None:
    for name in ("naive", "tree", "ring", "full_ring", "direct"):
        each = schedule(name, 4)
        sizes = {lower(each, 0, numel, 4, LoweringConfig(64)).staging_nbytes(4) for numel in (400, 1000, 4000)}
        assert sizes == {3 * 64 if name == "direct" else 2 * 64}


def test_small_tensors_take_small_slots() -> None:
    plan = lower(schedule("ring", 4), 0, 40, 4, LoweringConfig(1 << 20))
    assert {each.numel for each in plan.buffers[1:]} == {12}  # the largest chunk: three units of 16 bytes
    assert lower(schedule("ring", 4), 0, 40, 4, LoweringConfig(1 << 20, fuse=True)).staging_nbytes(4) < 2 * 48


def test_more_than_26_slots_have_names_too() -> None:
    plan = lower(schedule("direct", 30), 0, 480, 4, LoweringConfig(16))
    assert [each.name for each in plan.buffers[25:]] == ["Y", "Z", "AA", "AB", "AC"]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_full_ring_alternates_two_slots(world_size: int) -> None:
    """Even steps send from slot A and receive into slot B, odd steps the reverse; in every slice."""
    for rank in range(world_size):
        plan = plan_of("full_ring", world_size, rank)
        names = [each.name for each in plan.buffers]
        for each in plan.instructions:
            forwards, fills = ("A", "B") if each.step % 2 == 0 else ("B", "A")
            if isinstance(each, Send):
                assert names[each.source.buffer] == forwards
            elif isinstance(each, Recv):
                assert names[each.out.buffer] == fills
            elif isinstance(each, Copy):
                assert each.step == 0 and names[each.out.buffer] == "A"
            else:
                assert isinstance(each, Combine)
                assert [names[span.buffer] for span in each.operands] == ["data", fills]
                assert names[each.out.buffer] == "data"


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize(("name", "rank"), [("ring", 1), ("reduce_scatter", 2), ("naive", 0)])
def test_consecutive_arrivals_take_consecutive_slots(name: str, rank: int, num_slots: int) -> None:
    plan = lower(schedule(name, 4), rank, 160, 4, LoweringConfig(32, num_slots=num_slots))
    staged = [each.out.buffer for each in plan.instructions if isinstance(each, Recv) and each.out.buffer]
    assert len(staged) >= 15
    assert staged == [1 + number % num_slots for number in range(len(staged))]


def test_starts_are_aligned_and_the_last_chunk_takes_the_rest() -> None:
    for itemsize in (1, 2, 4, 8):
        for numel in (0, 1, 5, 63, 64, 65, 1000):
            each = schedule("ring", 4)
            spans = [each.chunk_span(chunk, numel, itemsize) for chunk in range(4)]
            assert spans[0][0] == 0 and spans[-1][1] == numel
            assert all(stop == start for (_, stop), (start, _) in pairwise(spans))
            assert all(start * itemsize % 16 == 0 or start == numel for start, _ in spans)
            lengths = [stop - start for start, stop in spans]
            assert max(lengths) * itemsize - numel * itemsize / 4 < 16

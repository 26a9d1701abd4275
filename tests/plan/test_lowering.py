"""What lowering takes care of, shown on small algorithms that need it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from microddp.errors import PlanError
from microddp.plan import LoweringConfig, check_races, derive, hoist, lower, prove
from microddp.plan.instructions import ARRIVAL, DATA, RecvCombine, Send, Span
from microddp.plan.proof import Mode
from microddp.schedule import OWN, Fold, Schedule, Step, only, schedule
from microddp.schedule import Recv as ScheduleRecv
from microddp.schedule import Send as ScheduleSend
from tests.schedule.reference import schedule_of

MODES: tuple[Mode, ...] = ("any", "host", "stream")


def doubling(rank: int, world_size: int) -> Iterator[Step]:
    """Two ranks that exchange one chunk and fold: the sent chunk is folded into in the same step."""
    peer = 1 - rank
    arrival = ScheduleRecv(peer, 0, only(peer), key=peer)
    yield Step((ScheduleSend(peer, 0), arrival), folds=(Fold(0, (OWN, peer)),))


def exchange() -> Schedule:
    return schedule_of([list(doubling(rank, 2)) for rank in (0, 1)], schedule("naive", 2))


def test_fusing_into_what_is_sent_is_a_deadlock() -> None:
    """Each rank's receive would wait for its own send, which waits for the other's receive; so it is not fused."""
    each = exchange()
    plans = [lower(each, rank, 4, 4, LoweringConfig(16, fuse=True)) for rank in (0, 1)]
    assert not any(isinstance(one, RecvCombine) for plan in plans for one in plan.instructions)
    for mode in MODES:
        prove(each, plans, mode=mode)
    data = Span(DATA, 0, 4)
    for rank in (0, 1):
        fused = (Send(0, 0, 1 - rank, data), RecvCombine(0, 0, 1 - rank, data, (data, ARRIVAL)))
        plans[rank] = replace(plans[rank], instructions=fused, after=derive(fused))
        check_races(plans[rank])
    for mode in MODES:
        with pytest.raises(PlanError, match="deadlock: rank 0 waits for instruction 0, Send.*; rank 1 waits for"):
            prove(each, plans, mode=mode)


def test_a_staged_arrival_is_not_fused_into_a_chunk_that_another_replaces() -> None:
    """The fold comes after both receives; fused, it would happen before the second one overwrites its result."""
    fold = (Fold(0, (OWN, 1)),)
    table = [
        [Step((ScheduleSend(2, 0),)), Step((ScheduleRecv(1, 0, only(1), key=1), ScheduleRecv(2, 0, BOTH)), folds=fold)],
        [Step(), Step((ScheduleSend(0, 0),))],
        [Step((ScheduleRecv(0, 0, only(0), key=0),), folds=(Fold(0, (0, OWN)),)), Step((ScheduleSend(0, 0),))],
    ]
    each = replace(schedule_of(table, schedule("reduce", 3)), root=0)
    for fuse in (False, True):
        plans = [lower(each, rank, 12, 4, LoweringConfig(16, fuse=fuse)) for rank in range(3)]
        prove(each, plans)
        assert fuse == any(isinstance(one, RecvCombine) for one in plans[2].instructions)
        assert not any(isinstance(one, RecvCombine) for one in plans[0].instructions)


BOTH = (*only(0), *only(2))


def chunk_by_chunk(rank: int, world_size: int) -> Iterator[Step]:
    """To rank 0 in rank order, the two chunks' folds interleaved over the steps, and back."""
    for peer in range(1, world_size):
        for chunk in range(2):
            if rank == 0:
                yield Step((ScheduleRecv(peer, chunk, only(peer), key=peer),), folds=(Fold(chunk, (OWN, peer)),))
            else:
                yield Step((ScheduleSend(0, chunk),) if rank == peer else ())


def test_each_unfinished_chunk_has_an_accumulator_of_its_own() -> None:
    like = schedule("reduce", 4)
    entry = replace(like.entry, steps=lambda r, n, root=0: chunk_by_chunk(r, n), num_chunks=2, slice_major=True)
    each = Schedule(replace(entry, rank_order=True), 4)
    plans = [lower(each, rank, 40, 2, LoweringConfig(16, wide=True)) for rank in range(4)]
    assert [one.name for one in plans[0].buffers if one.wide] == ["acc", "acc1"]
    for plan in plans:
        check_races(plan)
    for order in (plans, [hoist(plan) for plan in plans]):
        prove(each, order, wide=True)
    step_by_step = Schedule(replace(entry, rank_order=True, slice_major=False), 4)
    with pytest.raises(PlanError, match="reduce folds one chunk over several steps: declare it slice_major"):
        lower(step_by_step, 0, 40, 2, LoweringConfig(16, wide=True))


def chain(rank: int, world_size: int) -> Iterator[Step]:
    """Rank order, but the partial result travels: rounded at each hop where the type is narrow."""
    for step in range(world_size - 1):
        if rank == step:
            yield Step((ScheduleSend(rank + 1, 0),))
        elif rank == step + 1:
            carries = (range(rank),)
            yield Step((ScheduleRecv(rank - 1, 0, carries, key=0),), folds=(Fold(0, (0, OWN)),))
        else:
            yield Step()


def test_a_partial_fold_that_travels_is_not_in_rank_order_for_narrow_types() -> None:
    like = schedule("reduce", 3, root=2)
    each = Schedule(replace(like.entry, steps=lambda r, n, root=0: chain(r, n), rank_order=True), 3, 2)
    assert each.verify().rank_order
    prove(each, [lower(each, rank, 4, 4, LoweringConfig(16)) for rank in range(3)])
    with pytest.raises(PlanError, match="reduce, rank 1, step 0: uses a fold of some contributions before"):
        lower(each, 1, 4, 2, LoweringConfig(16, wide=True))


def test_a_value_kept_across_steps_needs_slice_major() -> None:
    each = schedule("full_ring", 3)
    careless = replace(each, entry=replace(each.entry, slice_major=False))
    with pytest.raises(PlanError, match="full_ring keeps a staged value across steps: declare it slice_major"):
        lower(careless, 0, 9, 4, LoweringConfig(16))

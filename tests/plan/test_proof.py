"""Every plan is what its schedule says: race-free, and right element by element in whatever order it may run.

The gate tries some 700 lowerings that rotate through all values of every dimension; MICRODDP_THOROUGH=1 tries all
combinations of algorithm, world size, size, slice, fusing and hoisting.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from microddp.errors import PlanError
from microddp.plan import LoweringConfig, check_races, hoist, lower, prove
from microddp.plan.proof import Mode
from microddp.schedule import schedule
from tests.plan.cells import ARITHMETIC, ITEMSIZES, SLICES, THOROUGH, Cell, cells, sizes

CELLS_EACH = 10


def orders(cell: Cell, number: int) -> list[tuple[Mode, int]]:
    """(mode, seed): in thorough runs all, in the gate some.

    Streams play plans as they are lowered: what is hoisted on two ranks need not meet in the same group.
    """
    modes: list[tuple[Mode, int]] = [("any", number), ("host", number)]
    if THOROUGH:
        modes += [("any", number + 1), ("any", number + 2)]
    return modes if cell.hoisted else [*modes, ("stream", number)]


@pytest.mark.timeout(3600 if THOROUGH else 120)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_plan_is_proved(world_size: int) -> None:
    for number, cell in enumerate(cells([world_size], CELLS_EACH)):
        plans = cell.plans()
        for plan in plans:
            check_races(plan)
        for mode, seed in orders(cell, number):
            try:
                prove(cell.schedule, plans, mode=mode, seed=seed, **ARITHMETIC[cell.arithmetic])
            except PlanError as error:
                pytest.fail(f"{cell}, {mode}: {error}", pytrace=False)


def test_every_value_of_every_dimension_meets_every_algorithm() -> None:
    met: Counter[tuple[object, ...]] = Counter()
    names = set()
    for cell in cells(range(2, 9), CELLS_EACH):
        name = cell.schedule.algorithm, cell.schedule.entry.rank_order
        names.add(name)
        size = sizes(cell.schedule).index(cell.numel)
        for dimension, value in zip(count(), (size, cell.slice_nbytes, cell.fuse, cell.hoisted, cell.arithmetic)):
            met[name, dimension, value] += 1
        met[name, 5, cell.itemsize] += 1
    wanted = 8 + len(SLICES) + 2 + 2 + len(ARITHMETIC) + len(ITEMSIZES)
    # Two sizes can be one number (n-1 = 1 for two ranks), and then count as the first of them.
    assert len(names) == 10 and len(met) == len(names) * wanted


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_rooted_collectives_from_every_root(world_size: int) -> None:
    for name in ("broadcast", "reduce"):
        for root in range(world_size):
            each = schedule(name, world_size, root=root)
            plans = [hoist(lower(each, rank, 21, 4, LoweringConfig(32))) for rank in range(world_size)]
            for mode in ("any", "host"):
                prove(each, plans, mode=mode)


def test_one_rank_does_nothing() -> None:
    for name in ("naive", "tree", "ring", "full_ring", "direct", "reduce_scatter", "all_gather"):
        each = schedule(name, 1)
        plan = lower(each, 0, 100, 4, LoweringConfig(16, divides=True))
        assert plan.instructions == () and not plan.writes_data and plan.staging_nbytes(4) == 0
        prove(each, [plan], divides=True)


def test_a_stream_cannot_play_hoisted_plans() -> None:
    """The reason why streams get plans as they are lowered; if this ever passes, let streams have hoisted ones."""
    each = schedule("ring", 3)
    plans = [lower(each, rank, 64, 4, LoweringConfig(16)) for rank in range(3)]
    prove(each, plans, mode="stream")
    with pytest.raises(PlanError, match="deadlock: rank 0 waits for instruction"):
        prove(each, [hoist(plan) for plan in plans], mode="stream")


@pytest.mark.parametrize("slice_nbytes", [-16, 0, 8, 17, 40])
def test_slices_are_multiples_of_16_bytes(slice_nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"slice_nbytes must be a positive multiple of 16, not {slice_nbytes}"):
        LoweringConfig(slice_nbytes)


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1, not 0"):
        LoweringConfig(16, num_slots=0)
    with pytest.raises(ValueError, match="unknown mode 'gpu'; known: any, host, stream"):
        prove(schedule("ring", 1), [], mode="gpu")  # type: ignore[arg-type]


def test_a_plan_of_every_rank_is_needed() -> None:
    each = schedule("ring", 2)
    plans = [lower(each, rank, 8, 4, LoweringConfig(16)) for rank in (0, 1)]
    for wrong in ([], plans[:1], plans[::-1], [*plans, plans[0]]):
        with pytest.raises(ValueError, match=r"expected a plan for each of 2 ranks, got \(rank, world_size\)"):
            prove(each, wrong)
    with pytest.raises(ValueError, match="plans of different sizes"):
        prove(each, [plans[0], lower(each, 1, 9, 4, LoweringConfig(16))])

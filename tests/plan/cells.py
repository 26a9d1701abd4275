"""The matrix of plans: which lowerings are tried, thinly in the gate and in full with MICRODDP_THOROUGH=1."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.schedule import Schedule
from tests.schedule.reference import every_schedule

THOROUGH = os.environ.get("MICRODDP_THOROUGH") == "1"

SLICES = (16, 32, 48, 64, 1 << 20)
ITEMSIZES = (1, 2, 4, 8)
SLOTS = (2, 3)
ARITHMETIC: tuple[dict[str, bool], ...] = (
    {},
    {"wide": True},
    {"divides": True},
    {"wide": True, "divides": True},
    {"wide": True, "divides": True, "means": True},
    {"wire": True},
    {"wire": True, "wide": True, "divides": True},
    {"wire": True, "wide": True, "divides": True, "means": True},
)


def sizes(schedule: Schedule) -> list[int]:
    """Numbers of elements: none, fewer than ranks, one more or less, uneven, several slices."""
    n = schedule.world_size
    numels = [0, 1, n - 1, n + 1, 13, 29, 16 * n, 40 * n + 5]
    is_equal = schedule.collective in ("reduce_scatter", "all_gather")
    return [numel * n if is_equal else numel for numel in numels]


@dataclass(frozen=True)
class Cell:
    """One way to lower one schedule."""

    schedule: Schedule
    numel: int
    slice_nbytes: int
    fuse: bool
    hoisted: bool
    arithmetic: int
    itemsize: int
    num_slots: int

    def config(self) -> LoweringConfig:
        options: dict[str, Any] = ARITHMETIC[self.arithmetic]
        return LoweringConfig(self.slice_nbytes, self.num_slots, self.fuse, **options)

    def plans(self) -> list[Plan]:
        config = self.config()
        ranks = range(self.schedule.world_size)
        plans = [lower(self.schedule, rank, self.numel, self.itemsize, config) for rank in ranks]
        return [hoist(plan) for plan in plans] if self.hoisted else plans


def cells(world_sizes: Sequence[int], count: int) -> Iterator[Cell]:
    """``count`` cells for each algorithm and world size, such that every value of a dimension comes up as often.

    All combinations of size, slice, fusing and hoisting where the run is thorough; the rest rotates then too.
    """
    for world_size in world_sizes:
        for schedule in every_schedule(world_size, roots=(world_size // 2,)):
            mixed = random.Random(f"{schedule.algorithm} {schedule.entry.rank_order} {world_size}")
            crossed = list(product(sizes(schedule), SLICES, (False, True), (False, True)))
            if not THOROUGH:
                axes = [sizes(schedule), SLICES, (False, True), (False, True)]
                crossed = list(zip(*(rotation(axis, count, mixed) for axis in axes)))
            rest = [rotation(axis, len(crossed), mixed) for axis in (range(len(ARITHMETIC)), ITEMSIZES, SLOTS)]
            for (numel, slice_nbytes, fuse, hoisted), last in zip(crossed, zip(*rest)):
                yield Cell(schedule, numel, slice_nbytes, fuse, hoisted, *last)


def rotation(values: Sequence[Any], count: int, mixed: random.Random) -> list[Any]:
    """``count`` values, each equally often, in a mixed order."""
    repeated = [values[each % len(values)] for each in range(count)]
    mixed.shuffle(repeated)
    return repeated

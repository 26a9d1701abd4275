"""What is drawn for the cells of the matrix: ranks, slices, sizes, layouts and kinds of values."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.matrix import LEGAL, Cell
from tests.matrix_tools import Job, layouts_of

__all__ = ["Batch", "batches", "cells_of"]

MAX_NUMEL = 2000
MAX_SLICES = {False: 64, True: 16}  # over all ranks: a plan in Python grows with them, what they can show does not
FACTORS = (1, 2, 3, 4, 5, 7, 8)


@dataclass(frozen=True)
class Batch:
    """Jobs that one set of rank threads runs one after the other; slicing None: the library's own."""

    world_size: int
    slice_nbytes: int | None
    num_slots: int | None
    jobs: tuple[Job, ...]


def cells_of(row: str, op: str, is_new: bool) -> list[Cell]:
    """The legal cells of a group."""
    return [cell for cell in LEGAL if (cell.row, cell.op, cell.is_new) == (row, op, is_new)]


@st.composite
def batches(draw: st.DrawFn, row: str, op: str, is_new: bool) -> Batch:
    """One job for each cell of the group."""
    world_size = draw(st.sampled_from((4, 3, 2, 5, 8, 9, 7, 6, 1)), label="world_size")
    is_sliced = draw(st.integers(0, 4)) < 4
    slice_nbytes = draw(st.integers(1, 16)) * 16 if is_sliced else None
    num_slots = draw(st.integers(2, 4)) if is_sliced else None
    cells = cells_of(row, op, is_new)
    if is_new:
        sizes = {
            Job(cell, ()).itemsize: draw(st.lists(sized(cell, world_size, slice_nbytes), min_size=2, max_size=2))
            for cell in cells
        }
        jobs = tuple(new_job(cell, sizes[Job(cell, ()).itemsize], draw(st.integers(0, 2**32 - 1))) for cell in cells)
    else:
        jobs = tuple(draw(jobs_of(cell, world_size, slice_nbytes)) for cell in cells)
    return Batch(world_size, slice_nbytes, num_slots, jobs)


@st.composite
def jobs_of(draw: st.DrawFn, cell: Cell, world_size: int, slice_nbytes: int | None) -> Job:
    return Job(
        cell,
        draw(sized(cell, world_size, slice_nbytes)),
        layout=draw(st.sampled_from(layouts_of(cell.dtype))),
        layouts_differ=draw(st.booleans()),
        uses_out=draw(st.booleans()),
        is_async=draw(st.integers(0, 3)) == 3,
        is_special=draw(st.integers(0, 3)) == 3,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def new_job(cell: Cell, sizes: list[tuple[int, ...]], seed: int) -> Job:
    """A job by one number that is drawn: there are many new cells, and drawing takes as long as running."""
    choices = random.Random(seed)
    return Job(
        cell,
        choices.choice(sizes),
        layout=choices.choice(layouts_of(cell.dtype)),
        layouts_differ=choices.random() < 0.5,
        uses_out=choices.random() < 0.5,
        is_async=choices.random() < 0.2,
        is_special=choices.random() < 0.3,
        seed=seed,
    )


@st.composite
def sized(draw: st.DrawFn, cell: Cell, world_size: int, slice_nbytes: int | None) -> tuple[int, ...]:
    itemsize = Job(cell, ()).itemsize
    numel = draw(numels(world_size, itemsize))
    if slice_nbytes is not None:
        numel = min(numel, MAX_SLICES[cell.is_new] // world_size * slice_nbytes // itemsize)
    return draw(shapes(numel))


def numels(world_size: int, itemsize: int) -> st.SearchStrategy[int]:
    """Where chunks are even, uneven, short and empty."""
    unit = 16 // itemsize * world_size
    return st.one_of(
        st.just(world_size),
        st.integers(0, world_size),
        st.integers(1, MAX_NUMEL // unit).map(lambda count: count * unit),
        st.integers(1, max(1, 40 // itemsize)).map(lambda count: count * unit + 1),
        st.integers(world_size, 20 * world_size),
        st.integers(0, MAX_NUMEL),
    )


@st.composite
def shapes(draw: st.DrawFn, numel: int) -> tuple[int, ...]:
    if numel == 1 and draw(st.booleans()):
        return ()
    shape: tuple[int, ...] = (numel,)
    for _ in range(draw(st.integers(0, 2))):
        factor = draw(st.sampled_from([each for each in FACTORS if shape[-1] % each == 0]))
        shape = (*shape[:-1], factor, shape[-1] // factor)
    return shape

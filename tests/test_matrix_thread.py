"""The matrix on threads: every legal cell by property tests, every illegal one refused."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import microddp
from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks
from tests.matrix import CHOSEN, DTYPES, ILLEGAL, LEGAL, OPS, ROWS, Cell
from tests.matrix_oracle import check
from tests.matrix_tools import LAYOUTS, Job, Outcome, play, poisoned_staging

pytestmark = pytest.mark.timeout(120)

NUM_LEGAL = 434
NUM_ILLEGAL = 126
MIN_EXAMPLES = 5
MAX_NUMEL = 2000
MAX_SLICES = 64  # over all ranks: a plan in Python grows with them, what they can show does not
TIMEOUT_S = 60.0

GROUPS = [(row, op) for row in (*ROWS, CHOSEN) for op in OPS]
FACTORS = (1, 2, 3, 4, 5, 7, 8)

examples: Counter[Cell] = Counter()  # of this run
seen: Counter[Any] = Counter()


@pytest.fixture(scope="module", autouse=True)
def poison() -> Iterator[None]:
    with poisoned_staging():
        yield


@dataclass(frozen=True)
class Batch:
    """Jobs that one set of rank threads runs one after the other; slicing None: the library's own."""

    world_size: int
    slice_nbytes: int | None
    num_slots: int | None
    jobs: tuple[Job, ...]


@st.composite
def batches(draw: st.DrawFn, row: str, op: str) -> Batch:
    """One job for each dtype of the operator."""
    world_size = draw(st.sampled_from((4, 3, 2, 5, 8, 9, 7, 6, 1)), label="world_size")
    is_sliced = draw(st.integers(0, 4)) < 4
    slice_nbytes = draw(st.integers(1, 16)) * 16 if is_sliced else None
    num_slots = draw(st.integers(2, 4)) if is_sliced else None
    jobs = tuple(draw(jobs_of(Cell(row, op, dtype), world_size, slice_nbytes)) for dtype in OPS[op])
    return Batch(world_size, slice_nbytes, num_slots, jobs)


@st.composite
def jobs_of(draw: st.DrawFn, cell: Cell, world_size: int, slice_nbytes: int | None) -> Job:
    numel = draw(numels(world_size, cell.dtype.itemsize))
    if slice_nbytes is not None:
        numel = min(numel, MAX_SLICES // world_size * slice_nbytes // cell.dtype.itemsize)
    return Job(
        cell,
        draw(shapes(numel)),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        layouts_differ=draw(st.booleans()),
        uses_out=draw(st.booleans()),
        is_async=draw(st.integers(0, 3)) == 3,
        is_special=draw(st.integers(0, 3)) == 3,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


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


def run(batch: Batch) -> list[list[Outcome]]:
    """By rank, then by job."""
    if batch.slice_nbytes is None:
        return microddp.run_threads(play, batch.world_size, args=(batch.jobs,), timeout=TIMEOUT_S)

    def body(transport: Transport) -> list[Outcome]:
        with Communicator(transport, slice_nbytes=batch.slice_nbytes, num_slots=batch.num_slots) as comm:
            return play(comm, batch.jobs)

    return run_thread_ranks(body, batch.world_size, timeout=TIMEOUT_S)


def num_examples() -> int:
    """One more than five, as a search may begin with its simplest example; a search in depth takes many."""
    return MIN_EXAMPLES + 1 if settings().derandomize else settings().max_examples // 20


def seed_of(row: str, op: str) -> int:
    """One for each group, or all would draw the same examples; another in each run of a search in depth."""
    return zlib.crc32(f"{row} {op}".encode()) if settings().derandomize else random.getrandbits(32)


@pytest.mark.parametrize(("row", "op"), GROUPS, ids=[f"{row} {op}".replace(" ", "-") for row, op in GROUPS])
def test_legal_cells(row: str, op: str) -> None:
    ran: Counter[Cell] = Counter()

    @seed(seed_of(row, op))
    @settings(
        max_examples=num_examples(), phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
    )
    @given(batches(row, op))
    def search(batch: Batch) -> None:
        outcomes = run(batch)
        for number, job in enumerate(batch.jobs):
            check(job, [each[number] for each in outcomes])
            ran[job.cell] += 1
            note(batch, job)

    search()
    assert all(ran[Cell(row, op, dtype)] >= MIN_EXAMPLES for dtype in OPS[op]), ran
    examples.update(ran)


def note(batch: Batch, job: Job) -> None:
    """Counts what was tried, by row, so that a search that has gone blind is noticed."""
    numel, world_size, row = job.numel, batch.world_size, job.cell.row
    tried = {
        "no elements": numel == 0,
        "one element": numel == 1,
        "fewer elements than ranks": 0 < numel < world_size,
        "as many elements as ranks": numel == world_size,
        "not divisible": numel > world_size and numel % world_size > 0,
        "divisible by 16 n bytes": numel > 0 and job.nbytes % (16 * world_size) == 0,
        "no dimension": not job.shape,
        "several slices": batch.slice_nbytes is not None and job.nbytes > 2 * world_size * batch.slice_nbytes,
        "default slices": batch.slice_nbytes is None,
        "special values": job.is_special and numel > 0,
        "out": job.uses_out,
        "async": job.is_async,
        job.layout: True,
        f"{world_size} ranks": True,
        **{f"{number} slots": batch.num_slots == number for number in (2, 3, 4)},
    }
    for name, is_so in tried.items():
        seen[row, name] += is_so


@pytest.mark.parametrize("row", [*ROWS, CHOSEN])
def test_illegal_cells_are_refused_by_every_rank(row: str) -> None:
    algorithm, order = (None, None) if row == CHOSEN else (ROWS[row].algorithm, ROWS[row].order)
    cells = [cell for cell in ILLEGAL if cell.row == row]

    def body(comm: Communicator) -> list[BaseException | None]:
        errors: list[BaseException | None] = []
        for number, (_, op, dtype) in enumerate(cells):
            x = torch.ones(5, dtype=dtype)
            try:
                comm.all_reduce(x, op, algorithm, order)
                errors.append(None)
            except Exception as error:
                errors.append(error)
            assert torch.equal(x, torch.ones(5, dtype=dtype))
            assert comm.all_reduce(torch.tensor([number * 10 + comm.rank])).tolist() == [30 * number + 3]
        return errors

    for rank, errors in enumerate(microddp.run_threads(body, 3, timeout=TIMEOUT_S)):
        for (_, op, dtype), error in zip(cells, errors, strict=True):
            assert type(error) is TypeError, error
            text = str(error)
            assert f"rank {rank} of 3" in text and f"'{op}' is not defined on {str(dtype)[6:]};" in text


@pytest.mark.parametrize("row", [*ROWS, CHOSEN])
def test_expanded_tensor_is_refused_in_place_by_every_rank(row: str) -> None:
    algorithm, order = (None, None) if row == CHOSEN else (ROWS[row].algorithm, ROWS[row].order)

    def body(comm: Communicator) -> None:
        for dtype in DTYPES:
            x = torch.ones(1, 3, dtype=dtype).expand(4, 3)
            with pytest.raises(ValueError, match=f"rank {comm.rank} of 2.*elements of x share memory"):
                comm.all_reduce(x, "max", algorithm, order)
            assert bool((x == 1).all())
        assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3

    microddp.run_threads(body, 2, timeout=TIMEOUT_S)


def test_number_of_cells(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell(row, op, dtype) for row, op in GROUPS for dtype in OPS[op]]
    with capsys.disabled():
        print(f"\nmatrix: {len(LEGAL)} legal cells, {len(ILLEGAL)} illegal, {sum(examples.values())} examples run")
    assert cells == LEGAL and len(set(cells)) == NUM_LEGAL
    assert len(set(ILLEGAL)) == NUM_ILLEGAL and not set(ILLEGAL) & set(LEGAL)
    assert set(ILLEGAL) | set(LEGAL) == {
        Cell(row, op, dtype) for row in (*ROWS, CHOSEN) for op in OPS for dtype in OPS["sum"]
    }
    rows = {each.row for each in examples}
    if set(examples) == set(LEGAL):  # all groups ran, and passed
        assert min(examples.values()) >= MIN_EXAMPLES
        names = {name for _, name in seen}
        assert not [(row, name) for row in rows for name in names if not seen[row, name]]

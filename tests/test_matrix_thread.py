"""The matrix on threads: every legal cell by property tests, every illegal one refused."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import microddp
from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks
from tests.matrix import CHOSEN, DTYPES, ILLEGAL, ILLEGAL_WIRES, LEGAL, OPS, ROWS, Cell
from tests.matrix_oracle import check
from tests.matrix_strategies import Batch, batches, cells_of
from tests.matrix_tools import Job, Outcome, layouts_of, play, poisoned_staging

pytestmark = pytest.mark.timeout(120)

NUM_LEGAL = 1463
NUM_ON_A_WIRE = 770  # of the legal ones
NUM_ILLEGAL = 259
NUM_ILLEGAL_WIRES = 1474
MIN_EXAMPLES = {False: 5, True: 3}  # of a cell, by whether it is new
TIMEOUT_S = 60.0

GROUPS = [(row, op, is_new) for row in (*ROWS, CHOSEN) for op in OPS for is_new in (False, True)]

examples: Counter[Cell] = Counter()  # of this run
seen: Counter[Any] = Counter()


@pytest.fixture(scope="module", autouse=True)
def poison() -> Iterator[None]:
    with poisoned_staging():
        yield


def run(batch: Batch) -> list[list[Outcome]]:
    """By rank, then by job."""
    if batch.slice_nbytes is None:
        return microddp.run_threads(play, batch.world_size, args=(batch.jobs,), timeout=TIMEOUT_S)

    def body(transport: Transport) -> list[Outcome]:
        with Communicator(transport, slice_nbytes=batch.slice_nbytes, num_slots=batch.num_slots) as comm:
            return play(comm, batch.jobs)

    return run_thread_ranks(body, batch.world_size, timeout=TIMEOUT_S)


def num_examples(is_new: bool) -> int:
    """One more than five, as a search may begin with its simplest example; a search in depth takes many."""
    return MIN_EXAMPLES[is_new] + (not is_new) if settings().derandomize else settings().max_examples // 20


def seed_of(*group: object) -> int:
    """One for each group, or all would draw the same examples; another in each run of a search in depth."""
    return zlib.crc32(str(group).encode()) if settings().derandomize else random.getrandbits(32)


def id_of(row: str, op: str, is_new: bool) -> str:
    return f"{row} {op}{' new' if is_new else ''}".replace(" ", "-")


@pytest.mark.parametrize(("row", "op", "is_new"), GROUPS, ids=[id_of(*group) for group in GROUPS])
def test_legal_cells(row: str, op: str, is_new: bool) -> None:
    ran: Counter[Cell] = Counter()

    @seed(seed_of(row, op, is_new))
    @settings(
        max_examples=num_examples(is_new),
        phases=[Phase.generate] if is_new else [Phase.generate, Phase.shrink],  # a large batch shrinks for minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(batches(row, op, is_new))
    def search(batch: Batch) -> None:
        outcomes = run(batch)
        for number, job in enumerate(batch.jobs):
            check(job, [each[number] for each in outcomes])
            ran[job.cell] += 1
            note(batch, job)

    search()
    assert all(ran[cell] >= MIN_EXAMPLES[is_new] for cell in cells_of(row, op, is_new)), ran
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
        "on a wire": job.cell.wire is not None and world_size > 1 and numel > 0,
        **{f"{number} slots": batch.num_slots == number for number in (2, 3, 4)},
    }
    for name, is_so in tried.items():
        seen[row, name] += is_so


@pytest.mark.parametrize("row", [*ROWS, CHOSEN])
def test_one_element_in_every_layout(row: str) -> None:
    """Which torch calls contiguous whatever its stride."""
    layouts = [(dtype, layout) for dtype in DTYPES for layout in layouts_of(dtype)]
    jobs = tuple(
        Job(Cell(row, "sum", dtype), (1,), layout, uses_out=number % 3 == 0)
        for number, (dtype, layout) in enumerate(layouts)
    )
    outcomes = run(Batch(2, None, None, jobs))
    for number, job in enumerate(jobs):
        check(job, [each[number] for each in outcomes])


@pytest.mark.parametrize("row", [*ROWS, CHOSEN])
def test_illegal_cells_are_refused_by_every_rank(row: str) -> None:
    cells = [cell for cell in ILLEGAL if cell.row == row]
    for rank, errors in enumerate(refused(row, cells, every=1)):
        for cell, error in zip(cells, errors, strict=True):
            wanted = f"'{cell.op}' is not defined on {str(cell.dtype)[6:]};"
            assert type(error) is TypeError and f"rank {rank} of 3" in str(error) and wanted in str(error), error


@pytest.mark.parametrize("row", [*ROWS, CHOSEN])
def test_illegal_wire_types_are_refused_by_every_rank(row: str) -> None:
    cells = [cell for cell in ILLEGAL_WIRES if cell.row == row]
    for rank, errors in enumerate(refused(row, cells, every=10)):
        for cell, error in zip(cells, errors, strict=True):
            data, wire = str(cell.dtype)[6:], str(cell.travels)[6:]
            if cell.dtype.is_floating_point and cell.travels.is_floating_point:
                wanted = f"{data} cannot travel as {wire}: it would be rounded twice"
            else:
                wanted = f"wire_dtype converts between floats only: x is {data}, not {wire}"
            assert type(error) is TypeError and f"rank {rank} of 3" in str(error) and wanted in str(error), error


def refused(row: str, cells: list[Cell], *, every: int) -> list[list[BaseException | None]]:
    """What each rank raises for each cell; after that many of them it is seen that a legal call still works."""
    algorithm, order = (None, None) if row == CHOSEN else (ROWS[row].algorithm, ROWS[row].order)

    def body(comm: Communicator) -> list[BaseException | None]:
        errors: list[BaseException | None] = []
        for number, cell in enumerate(cells):
            x = torch.ones(5, dtype=cell.dtype)
            try:
                comm.all_reduce(x, cell.op, algorithm, order, wire_dtype=cell.wire)
                errors.append(None)
            except Exception as error:
                errors.append(error)
            assert torch.equal(x, torch.ones(5, dtype=cell.dtype))
            if number % every == 0:
                assert comm.all_reduce(torch.tensor([number * 10 + comm.rank])).tolist() == [30 * number + 3]
        return errors

    return microddp.run_threads(body, 3, timeout=TIMEOUT_S)


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
    on_a_wire = [cell for cell in LEGAL if cell.wire is not None]
    with capsys.disabled():
        print(
            f"\nmatrix: {len(LEGAL)} legal cells, {len(on_a_wire)} of them on a wire type; illegal: {len(ILLEGAL)}, "
            f"{len(ILLEGAL_WIRES)} for the wire type; {sum(examples.values())} examples run"
        )
    grouped = [cell for group in GROUPS for cell in cells_of(*group)]
    assert len(LEGAL) == len(grouped) == NUM_LEGAL and set(grouped) == set(LEGAL)
    assert len(set(on_a_wire)) == NUM_ON_A_WIRE
    assert len(ILLEGAL) == len(set(ILLEGAL)) == NUM_ILLEGAL and not set(ILLEGAL) & set(LEGAL)
    assert set(ILLEGAL) | {cell for cell in LEGAL if cell.wire is None} == {
        Cell(row, op, dtype) for row in (*ROWS, CHOSEN) for op in OPS for dtype in DTYPES
    }
    legal_wires, illegal_wires = ({cell[1:] for cell in cells} for cells in (on_a_wire, ILLEGAL_WIRES))
    assert len(ILLEGAL_WIRES) == len(illegal_wires) == NUM_ILLEGAL_WIRES and not legal_wires & illegal_wires
    assert legal_wires | illegal_wires == {
        (op, dtype, wire) for op, dtypes in OPS.items() for dtype in dtypes for wire in DTYPES if wire != dtype
    }
    if set(examples) == set(LEGAL):  # all groups ran, and passed
        assert all(count >= MIN_EXAMPLES[cell.is_new] for cell, count in examples.items())
        # Layouts of few types are seen by some row here, and by every row in test_one_element_in_every_layout.
        names, usual = {name for _, name in seen}, layouts_of(torch.int32)
        of_few_types = {name for dtype in DTYPES for name in layouts_of(dtype)}.difference(usual)
        assert {*usual, *of_few_types} <= names and all(
            any(seen[row, name] for row in (*ROWS, CHOSEN)) for name in of_few_types
        )
        everywhere = names - of_few_types
        assert not [(row, name) for row in (*ROWS, CHOSEN) for name in everywhere if not seen[row, name]]

"""The matrix on worker processes over Gloo: against the same oracle, and bit for bit against threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import microddp
from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks
from tests.matrix import CHOSEN, LEGAL, ROWS
from tests.matrix_oracle import check, same_bits
from tests.matrix_tools import Job, Outcome, layouts_of, play, poisoned_staging
from tests.transport.gloo_pool import GlooPool, gloo_pools  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)

WORLD_SIZES = (2, 3, 4)
NUM_CELLS = 300  # of each world size
NUM_ROWS = 1 + len(ROWS)
TIMEOUT_S = 60.0
SLICES = ((32, 2), (48, 3), (None, None))
NUMELS = (37, 5, 64, 1, 101, 2, 0, 50)


def jobs_for(world_size: int) -> list[Job]:
    """Each algorithm and operator on some of its dtypes, others for each world size, the layouts in turn.

    Of the new ones each operator, dtype and wire type, by one algorithm for each world size.
    """
    cells = []
    for shift, row in enumerate((*ROWS, CHOSEN)):
        old = [cell for cell in LEGAL if cell.row == row and not cell.is_new]
        new = [cell for cell in LEGAL if cell.row == row and cell.is_new]
        cells += [cell for number, cell in enumerate(old) if (number + shift + world_size) % 3 == 0]
        cells += [cell for number, cell in enumerate(new) if (number + shift + 2 * world_size) % NUM_ROWS == 0]
    return [
        Job(
            cell,
            (NUMELS[number % len(NUMELS)],),
            layout=layouts_of(cell.dtype)[number % len(layouts_of(cell.dtype))],
            layouts_differ=number % 4 == 0,
            uses_out=number % 3 == 0,
            is_async=number % 5 == 0,
            seed=number,
        )
        for number, cell in enumerate(cells)
    ]


def play_over(transport: Transport, jobs: list[Job]) -> list[Outcome]:
    """The jobs on one worker, a communicator for each slicing."""
    found: list[Outcome] = []
    with poisoned_staging():
        for part, (slice_nbytes, num_slots) in enumerate(SLICES):
            with microddp.init(slice_nbytes=slice_nbytes, num_slots=num_slots) as comm:
                assert comm.transport_name == "gloo"
                found += play(comm, jobs[part :: len(SLICES)])
                comm.barrier()
    return found


def play_on_threads(world_size: int, jobs: list[Job]) -> list[list[Outcome]]:
    """The same on threads, where what arrives is combined at once."""

    def body(slicing: tuple[int | None, int | None], part: list[Job]) -> list[list[Outcome]]:
        def play_rank(transport: Transport) -> list[Outcome]:
            with Communicator(transport, slice_nbytes=slicing[0], num_slots=slicing[1]) as comm:
                return play(comm, part)

        return run_thread_ranks(play_rank, world_size, timeout=TIMEOUT_S)

    parts = [body(slicing, jobs[number :: len(SLICES)]) for number, slicing in enumerate(SLICES)]
    return [[outcome for part in parts for outcome in part[rank]] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gloo_agrees_with_the_oracle_and_with_threads(
    gloo_pools: Callable[[int], GlooPool],  # noqa: F811
    world_size: int,
) -> None:
    jobs = jobs_for(world_size)
    by_rank = gloo_pools(world_size).run(play_over, jobs)
    on_threads = play_on_threads(world_size, jobs)
    in_order = [job for part in range(len(SLICES)) for job in jobs[part :: len(SLICES)]]
    for number, job in enumerate(in_order):
        outcomes = [each[number] for each in by_rank]
        check(job, outcomes)
        for rank in range(world_size):
            other = on_threads[rank][number]
            assert same_bits(outcomes[rank].result, other.result), f"{job}, rank {rank}: not what threads give"
            assert (outcomes[rank].sent, outcomes[rank].received) == (other.sent, other.received)


def test_every_cell_has_its_turn() -> None:
    by_world_size = [{job.cell for job in jobs_for(world_size)} for world_size in WORLD_SIZES]
    legal = set(LEGAL)
    assert all(cell.is_new for cell in legal.difference(*by_world_size))
    for cells in by_world_size:
        assert cells <= legal and len(cells) <= NUM_CELLS
        assert {cell[:2] for cell in cells} == {cell[:2] for cell in legal}
        assert {cell[1:] for cell in cells if cell.is_new} == {cell[1:] for cell in legal if cell.is_new}
    new = [cell for cells in by_world_size for cell in cells if cell.is_new]
    assert len(set(new)) == len(new)  # another algorithm for each world size
    assert {job.numel % 4 for job in jobs_for(4)} == {0, 1, 2}


def test_one_odd_bit_is_seen() -> None:
    """The comparison itself: results that differ in one bit are told apart, in any dtype."""
    for dtype in {cell.dtype for cell in LEGAL}:
        first = torch.ones(3, dtype=dtype)
        second = first.clone()
        second.view(torch.uint8)[-1] ^= 1
        assert same_bits(first, first.clone()) and not same_bits(first, second)

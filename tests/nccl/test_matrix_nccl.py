"""The matrix over the stand-in for NCCL by CuPy's own calls, 1 to 8 ranks: oracle, counters, and bit for bit threads.

A sample; with MICRODDP_NCCL_FULL=1 every legal cell at 1 to 4 ranks and at one of 5 to 8.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks
from tests.matrix import CHOSEN, ILLEGAL, ILLEGAL_WIRES, LEGAL, ROWS, Cell
from tests.matrix_oracle import check, same_bits
from tests.matrix_tools import Job, Outcome, layouts_of, play, poisoned_staging
from tests.nccl.matrix_nccl import (
    FULL_SIZES,
    SLICES,
    TIMEOUT_S,
    WORLD_SIZES,
    Played,
    jobs_for,
    play_in_process,
    play_slicing,
    slicing_of,
)
from tests.nccl.model_calls import Recv, Send
from tests.nccl.model_recording import RecordingNccl
from tests.nccl.ranks_tools import on_ranks, quick_switches, with_comms
from tests.transport.gloo_pool import GlooPool, gloo_pools

__all__ = ["gloo_pools"]

IS_FULL = os.environ.get("MICRODDP_NCCL_FULL") == "1"
IN_PROCESSES = (2, 4) if IS_FULL else (2,)  # new processes take seconds; those of two ranks others use too

pytestmark = [pytest.mark.timeout(300 if IS_FULL else 100), pytest.mark.usefixtures("standin")]


@pytest.fixture(scope="module", autouse=True)
def played_fast() -> Iterator[None]:
    with quick_switches(), poisoned_staging():
        yield


def play_on_threads(world_size: int, jobs: list[Job], part: int) -> list[list[Outcome]]:
    """The same on the thread transport, by rank: what arrives is combined at once there."""
    slice_nbytes, num_slots = SLICES[part]

    def body(transport: Transport) -> list[Outcome]:
        with Communicator(transport, slice_nbytes=slice_nbytes, num_slots=num_slots) as comm:
            return play(comm, jobs)

    return run_thread_ranks(body, world_size, timeout=TIMEOUT_S)


def check_all(jobs: list[Job], played: list[Played], on_threads: list[list[Outcome]]) -> None:
    """Against the oracle, what threads give, and what the stand-in has counted."""
    for number, job in enumerate(jobs):
        outcomes = [each.outcomes[number] for each in played]
        check(job, outcomes)
        for rank, outcome in enumerate(outcomes):
            other = on_threads[rank][number]
            assert same_bits(outcome.result, other.result), f"{job}, rank {rank}: not what threads give"
            assert (outcome.sent, outcome.received) == (other.sent, other.received), f"{job}, rank {rank}"
    for rank, each in enumerate(played):
        assert each.counted == each.moved, f"rank {rank} counted {each.counted} bytes; {each.moved} went through NCCL"


def report(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\nmatrix over the stand-in for NCCL, {text}", end="")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_threads_as_ranks(capsys: pytest.CaptureFixture[str], world_size: int) -> None:
    jobs, seconds = jobs_for(world_size, is_full=IS_FULL), 0.0
    for part in range(len(SLICES)):
        mine = slicing_of(jobs, part)
        played = on_ranks(world_size, partial(play_slicing, jobs=mine, part=part), timeout=240).checked()
        check_all(mine, played, play_on_threads(world_size, mine, part))
        seconds += played[0].seconds
    cells = len({job.cell for job in jobs})
    kinds = len({job.cell[:2] for job in jobs})
    report(capsys, f"{world_size} ranks: {cells} cells, {kinds} of algorithm and operator, {seconds:.1f} s")


@pytest.mark.parametrize("world_size", IN_PROCESSES)
def test_processes_as_ranks(
    capsys: pytest.CaptureFixture[str],
    gloo_pools: Callable[[int], GlooPool],
    standin_library: Path,
    world_size: int,
) -> None:
    jobs = jobs_for(world_size, is_full=False, shift=1)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    where = ("127.0.0.1", server.port)
    by_rank = gloo_pools(world_size).run(play_in_process, standin_library, where, "matrix", jobs)
    for part in range(len(SLICES)):
        mine = slicing_of(jobs, part)
        check_all(mine, [each[part] for each in by_rank], play_on_threads(world_size, mine, part))
    seconds = sum(each.seconds for each in by_rank[0])
    report(capsys, f"{world_size} processes: {len({job.cell for job in jobs})} cells, {seconds:.1f} s")


def test_what_a_full_run_covers() -> None:
    by_size = {size: jobs_for(size, is_full=True) for size in WORLD_SIZES}
    legal = set(LEGAL)
    for size in FULL_SIZES:
        assert {job.cell for job in by_size[size]} == legal
    larger = Counter(job.cell for size in WORLD_SIZES if size not in FULL_SIZES for job in by_size[size])
    assert set(larger) == legal and set(larger.values()) == {1}
    for jobs in by_size.values():
        assert {job.cell[:2] for job in jobs} == {cell[:2] for cell in legal}
        assert {job.cell.dtype for job in jobs} == {cell.dtype for cell in legal}
        assert {job.layout for job in jobs} == {name for cell in legal for name in layouts_of(cell.dtype)}
        for part in range(len(SLICES)):
            for name in ("uses_out", "is_async", "is_special", "layouts_differ"):
                assert {getattr(job, name) for job in slicing_of(jobs, part)} == {True, False}, name


def test_what_a_sample_covers() -> None:
    """All rows at every size; every operator and dtype at several."""
    by_size = {size: jobs_for(size, is_full=False) for size in WORLD_SIZES}
    for size, jobs in by_size.items():
        assert {job.cell.row for job in jobs} == {*ROWS, CHOSEN}, size
    cells = [job.cell for size in WORLD_SIZES if size > 1 for job in by_size[size]]
    assert {cell[:2] for cell in cells} == {cell[:2] for cell in LEGAL}
    assert {cell.dtype for cell in cells} == {cell.dtype for cell in LEGAL}


@pytest.mark.parametrize("row", [*ROWS, CHOSEN])
def test_illegal_cells_are_refused_by_every_rank_and_nothing_is_sent(row: str) -> None:
    place = [*ROWS, CHOSEN].index(row)
    cells = [cell for cell in ILLEGAL if cell.row == row][place % 3 :: 3]
    cells += [cell for cell in ILLEGAL_WIRES if cell.row == row][place % 20 :: 20]
    from cupy.cuda import nccl

    recorders = [RecordingNccl(nccl, rank) for rank in range(3)]

    def body(comm: Communicator) -> list[BaseException | None]:
        errors = [refusal(comm, cell) for cell in cells]
        calls = recorders[comm.rank].program
        assert not [call for call in calls if isinstance(call, (Send, Recv))] and comm.counters.bytes_sent == 0
        assert comm.all_reduce(torch.tensor([10 + comm.rank])).tolist() == [33]
        return errors

    for rank, errors in enumerate(with_comms(3, body, make_api=recorders.__getitem__).checked()):
        for cell, error in zip(cells, errors, strict=True):
            wanted = f"'{cell.op}' is not defined on {str(cell.dtype)[6:]};" if cell.wire is None else "travel"
            text = str(error)
            assert type(error) is TypeError and f"rank {rank} of 3" in text, error
            assert wanted in text or "wire_dtype converts between floats only" in text, error


def refusal(comm: Communicator, cell: Cell) -> BaseException | None:
    """What this rank raises for a cell."""
    algorithm, order = (None, None) if cell.row == CHOSEN else (ROWS[cell.row].algorithm, ROWS[cell.row].order)
    x = torch.ones(5, dtype=cell.dtype)
    try:
        comm.all_reduce(x, cell.op, algorithm, order, wire_dtype=cell.wire)
    except Exception as error:
        assert torch.equal(x, torch.ones(5, dtype=cell.dtype))
        return error
    return None


def test_a_wrong_bit_or_byte_is_seen(standin: ctypes.CDLL) -> None:
    """The comparison itself."""
    jobs = jobs_for(2, is_full=False)[:6]
    played = on_ranks(2, partial(play_slicing, jobs=jobs, part=0)).checked()
    threads = play_on_threads(2, jobs, 0)
    check_all(jobs, played, threads)
    first = next(each.result for each in threads[1] if each.result.numel())
    first.view(torch.uint8)[0] ^= 1
    with pytest.raises(AssertionError, match="rank 1: not what threads give"):
        check_all(jobs, played, threads)
    first.view(torch.uint8)[0] ^= 1
    sent, received = played[0].moved
    wrong = Played(played[0].outcomes, played[0].counted, (sent + 1, received), 0.0)
    with pytest.raises(AssertionError, match="rank 0 counted"):
        check_all(jobs, [wrong, played[1]], threads)

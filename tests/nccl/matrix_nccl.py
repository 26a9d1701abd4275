"""The matrix's jobs for the stand-in, and one rank's part in them: which cells at which world size, and what moved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.nccl import NcclTransport
from tests.matrix import CHOSEN, LEGAL, ROWS, Cell
from tests.matrix_tools import Job, Outcome, layouts_of, play, poisoned_staging
from tests.nccl.build import load_standin
from tests.nccl.standin_runtime import StandInRuntime
from tests.nccl.standin_tools import counters

__all__ = ["FULL_SIZES", "SLICES", "WORLD_SIZES", "Played", "jobs_for", "play_in_process", "play_slicing", "slicing_of"]

WORLD_SIZES = range(1, 9)
FULL_SIZES = (1, 2, 3, 4)  # where "full" means every cell; beyond, each cell at one size
SHARES = {1: 40, 2: 10, 3: 24, 4: 40, 5: 72, 6: 104, 7: 136, 8: 168}
"""In a sample: one in so many cells. A job takes about the square of the world size."""

SLICES: tuple[tuple[int | None, int | None], ...] = ((32, 2), (48, 3), (None, None))
NUMELS = (37, 5, 64, 1, 101, 2, 0, 50)
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Played:
    """One rank's part.

    Attributes:
        outcomes: of the jobs, in order.
        counted, moved: bytes sent and received: by the transport's counters, and by the stand-in's, which has sent and
            received one byte more for each connection.
        seconds: how long the jobs took.
    """

    outcomes: list[Outcome]
    counted: tuple[int, int]
    moved: tuple[int, int]
    seconds: float


def jobs_for(world_size: int, *, is_full: bool, shift: int = 0) -> list[Job]:
    """Sizes, layouts, ``out``, asynchronous calls and special values in turn, out of step with each other."""
    return [
        Job(
            cell,
            (NUMELS[(number + world_size) % len(NUMELS)],),
            layout=layouts_of(cell.dtype)[(number + world_size) % len(layouts_of(cell.dtype))],
            layouts_differ=number // len(SLICES) % 4 == 0,
            uses_out=number // len(SLICES) % 3 == 0,
            is_async=number // len(SLICES) % 5 < 2,
            is_special=number // len(SLICES) % 7 == 0,
            seed=10000 * world_size + number,
        )
        for number, cell in enumerate(cells_for(world_size, is_full=is_full, shift=shift))
    ]


def cells_for(world_size: int, *, is_full: bool, shift: int = 0) -> list[Cell]:
    """Of each row, as the cells of several rows would otherwise all be of the same few types."""
    if is_full and world_size in FULL_SIZES:
        return list(LEGAL)
    share = len(WORLD_SIZES) - len(FULL_SIZES) if is_full else SHARES[world_size]
    found = []
    for place, row in enumerate((*ROWS, CHOSEN)):
        cells = [cell for cell in LEGAL if cell.row == row]
        first = (5 * place + 3 * shift + world_size) % share
        found += cells[first::share]
    return found


def slicing_of(jobs: Sequence[Job], part: int) -> list[Job]:
    """Those that are played with slicing ``part``."""
    return list(jobs[part :: len(SLICES)])


def play_slicing(transport: NcclTransport, jobs: Sequence[Job], part: int) -> Played:
    """The jobs by one communicator."""
    slice_nbytes, num_slots = SLICES[part]
    with Communicator(transport, timeout=TIMEOUT_S, slice_nbytes=slice_nbytes, num_slots=num_slots) as comm:
        assert comm.transport_name == "nccl"
        begun = time.monotonic()
        outcomes = play(comm, jobs)
        comm.synchronize()
        seconds = time.monotonic() - begun
        counted = sum(each.sent for each in outcomes), sum(each.received for each in outcomes)
        moved = (0, 0)
        if transport.comm is not None:
            sent, received, *_ = counters(transport.comm)
            sends = sum(is_send for _, is_send in transport._edges)
            moved = sent - sends, received - (len(transport._edges) - sends)
        return Played(outcomes, counted, moved, seconds)


def play_in_process(pool: Transport, library: Path, store: tuple[str, int], name: str, jobs: list[Job]) -> list[Played]:
    """All jobs on one worker process: CuPy's calls and the stand-in in a process for each rank."""
    load_standin(library)
    played = []
    with poisoned_staging():
        for part in range(len(SLICES)):
            runtime = StandInRuntime()
            prefix: Any = PrefixStore(f"{name}/{part}", TCPStore(*store, None, False))
            transport = NcclTransport(prefix, pool.rank, pool.world_size, timeout=TIMEOUT_S, runtime=runtime)
            try:
                played.append(play_slicing(transport, slicing_of(jobs, part), part))
            finally:
                transport.close()
                runtime.close()
            assert not runtime.errors, runtime.errors
    return played

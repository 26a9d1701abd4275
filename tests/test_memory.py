"""Extra memory of all-reduce: the staging that the design promises, by the pool's count and by resident memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import microddp
from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import ThreadTransport
from tests.matrix import ROWS, Row, children
from tests.transport.gloo_pool import GlooPool, gloo_pools  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)

KIB, MIB = 1 << 10, 1 << 20
MAX_SLICE_NBYTES = MIB
PADDING = 256  # bytes, of each buffer
TIMEOUT_S = 60.0
SIZES = [
    *[(world_size, nbytes) for world_size in (2, 3, 4) for nbytes in (KIB, 36 * KIB, MIB, 3 * MIB)],
    (4, 12 * MIB),
    (2, 64 * MIB),
]


def chunk_nbytes(row: Row, nbytes: int, world_size: int) -> int:
    """The largest chunk of a tensor, in whole units of 16 bytes."""
    units = -(-nbytes // 16)
    return 16 * (-(-units // world_size) if row.is_chunked else units)


def checked_slice(comm: Communicator, row: Row, nbytes: int) -> int:
    """The slice that the last call ran with: all of the chunk up to 1 MiB, and at most that."""
    choice = comm.last_choice
    assert choice is not None and choice.num_slots == 2
    chunk = chunk_nbytes(row, nbytes, comm.world_size)
    assert choice.slice_nbytes == chunk if chunk <= MAX_SLICE_NBYTES else choice.slice_nbytes <= MAX_SLICE_NBYTES
    return choice.slice_nbytes


def staged_slices(row: Row, rank: int, world_size: int, is_narrow: bool) -> list[float]:
    """The buffers of a rank, in slices; one of a 16-bit type in float32 is two."""
    if row.algorithm == "naive":
        return [] if rank else [1.0, 1.0, *[2.0] * (is_narrow and world_size > 2)]
    if row.algorithm == "tree" and not children(rank, world_size):
        return []
    return [1.0] * row.slices(world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("world_size", "nbytes"), SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_pool_holds_what_the_table_says(
    name: str, world_size: int, nbytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is combined as it arrives, as between processes: then every slot is needed."""
    monkeypatch.setattr(ThreadTransport, "fuses_combine", False)
    row = ROWS[name]

    def body(comm: Communicator) -> tuple[int, int]:
        x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
        comm.all_reduce(x, "sum", row.algorithm, row.order)
        return comm.staging_nbytes, checked_slice(comm, row, nbytes)

    for rank, (held, slice_nbytes) in enumerate(microddp.run_threads(body, world_size, timeout=TIMEOUT_S)):
        slices = staged_slices(row, rank, world_size, dtype.itemsize == 2)
        wanted = sum(slices) * slice_nbytes
        assert wanted <= held <= wanted + PADDING * len(slices), f"rank {rank}: {held} bytes, {slices} slices"


@pytest.mark.parametrize("name", ROWS)
def test_pool_holds_no_more_where_arrivals_are_combined_at_once(name: str) -> None:
    row, world_size, nbytes = ROWS[name], 4, MIB

    def body(comm: Communicator) -> tuple[int, int]:
        for _ in range(3):
            comm.all_reduce(torch.ones(nbytes // 4), "sum", row.algorithm, row.order)
        return comm.staging_nbytes, checked_slice(comm, row, nbytes)

    for rank, (held, slice_nbytes) in enumerate(microddp.run_threads(body, world_size, timeout=TIMEOUT_S)):
        slices = staged_slices(row, rank, world_size, False)
        assert held <= sum(slices) * slice_nbytes + PADDING * len(slices)
        if name == "ring":
            assert held == 0


def test_pool_is_shared_by_all_calls_and_let_go_at_the_end() -> None:
    """One collective runs at a time: what is held is the most that one needs, not the sum."""
    least, most = 3 * MIB // 4, 2 * MIB  # of direct: three chunks; of an inner rank of the tree: two slices

    def body(comm: Communicator) -> Communicator:
        for name in ("direct", "ring", "tree", "direct"):
            comm.all_reduce(torch.ones(MIB // 4), algorithm=name)
        assert least <= comm.staging_nbytes <= most + 3 * PADDING
        return comm

    assert [comm.staging_nbytes for comm in microddp.run_threads(body, 4, timeout=TIMEOUT_S)] == [0] * 4


class Rise(NamedTuple):
    """How far the resident memory of a process rose during a call, what its pool held afterwards, a slice; bytes."""

    resident: int
    staging: int
    slice_nbytes: int


HAS_PROC = Path("/proc/self/clear_refs").exists()
LARGE_NBYTES = 256 * MIB
STRIDED_NBYTES = 64 * MIB
# Blocks of the launcher, Gloo's messages, the plan; and the kernel counts each thread's pages in batches of its own.
ALLOWANCE = 3 * MIB


def peak_and_now() -> tuple[int, int]:
    """Peak and present resident memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, now = (int(fields[name].split()[0]) * KIB for name in ("VmHWM", "VmRSS"))
    return peak, now


def rise_of(call: Callable[[], object]) -> int:
    """How far resident memory peaks above what it was before ``call``."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    _, before = peak_and_now()
    call()
    peak, _ = peak_and_now()
    return peak - before


def rises(transport: Transport, names: list[str]) -> dict[str, Rise]:
    """For each row, on a worker process."""
    x = torch.ones(LARGE_NBYTES // 4)
    found = {}
    for name in names:
        with microddp.init() as comm:
            comm.all_reduce(torch.ones(64), algorithm=ROWS[name].algorithm, order=ROWS[name].order)
            rise = rise_of(partial(comm.all_reduce, x, "sum", ROWS[name].algorithm, ROWS[name].order))
            found[name] = Rise(rise, comm.staging_nbytes, checked_slice(comm, ROWS[name], LARGE_NBYTES))
            comm.barrier()
    return found


def rise_of_strided(transport: Transport) -> tuple[int, int]:
    """For a transposed tensor; and, to show that the measure sees such things, for a clone."""
    x = torch.ones(STRIDED_NBYTES // 4 // 4096, 4096).t()
    with microddp.init() as comm:
        comm.all_reduce(torch.ones(64, 2).t(), algorithm="ring")
        rise = rise_of(lambda: comm.all_reduce(x, algorithm="ring"))
        comm.barrier()
    return rise, rise_of(lambda: x.clone())


@pytest.mark.skipif(not HAS_PROC, reason="this system has no /proc to read resident memory from")
def test_resident_memory_rises_by_the_staging_only(gloo_pools: Callable[[int], GlooPool]) -> None:  # noqa: F811
    for rank, by_name in enumerate(gloo_pools(2).run(rises, list(ROWS))):
        for name, rise in by_name.items():
            slices = staged_slices(ROWS[name], rank, 2, False)
            wanted = sum(slices) * rise.slice_nbytes
            assert wanted <= rise.staging <= wanted + PADDING * len(slices), (rank, name, rise)
            assert rise.resident <= wanted + ALLOWANCE, (rank, name, rise)


@pytest.mark.skipif(not HAS_PROC, reason="this system has no /proc to read resident memory from")
def test_tensor_that_is_not_dense_takes_one_temporary(gloo_pools: Callable[[int], GlooPool]) -> None:  # noqa: F811
    for rise, of_clone in gloo_pools(2).run(rise_of_strided):
        staging = 2 * MAX_SLICE_NBYTES
        assert abs(of_clone - STRIDED_NBYTES) <= ALLOWANCE
        assert STRIDED_NBYTES - ALLOWANCE <= rise <= STRIDED_NBYTES + staging + ALLOWANCE

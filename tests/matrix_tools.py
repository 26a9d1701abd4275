"""How a cell of the matrix is run: its values, the memory that they lie in, and the call. The same in any transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from microddp import Communicator
from microddp.staging import StagingPool
from tests.matrix import CHOSEN, ROWS, Cell, Row, row_of
from tests.matrix_values import draw_values

__all__ = ["LAYOUTS", "Job", "Outcome", "layouts_of", "play", "poisoned_staging", "values_of"]

Viewer = Callable[[torch.Tensor], torch.Tensor]

GUARD = 0xA5


@dataclass(frozen=True)
class Job:
    """One call of ``all_reduce`` on all ranks.

    Attributes:
        cell: what to combine, and how.
        shape: of the tensors.
        layout: a key of ``LAYOUTS`` for rank 0; further ranks take the next ones if ``layouts_differ``.
        uses_out: the result goes into another tensor.
        is_async: called in the background.
        is_special: floats have NaN, infinities, zeros and what overflows among them; integers extremes only.
        seed: of the values.
    """

    cell: Cell
    shape: tuple[int, ...]
    layout: str = "contiguous"
    layouts_differ: bool = False
    uses_out: bool = False
    is_async: bool = False
    is_special: bool = False
    seed: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Of the smaller of the data's and the travelling type: chunks and slices are cut for it."""
        return min(self.cell.dtype.itemsize, self.cell.travels.itemsize)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def layout_of(self, rank: int, shift: int = 0) -> str:
        names = layouts_of(self.cell.dtype)
        return names[(names.index(self.layout) + shift + rank * self.layouts_differ) % len(names)]


@dataclass(frozen=True)
class Outcome:
    """What one rank ended with: its result (1-D, logical order), what it moved, and by which row."""

    result: torch.Tensor
    sent: int
    received: int
    algorithm: str
    order: str | None

    @property
    def row(self) -> Row:
        return row_of(self.algorithm, self.order)


def _contiguous(shape: Sequence[int]) -> tuple[int, Viewer]:
    return math.prod(shape), lambda flat: flat.view(tuple(shape))


def _offset(shape: Sequence[int]) -> tuple[int, Viewer]:
    numel = math.prod(shape)
    return numel + 8, lambda flat: flat[3 : 3 + numel].view(tuple(shape))


def _transposed(shape: Sequence[int]) -> tuple[int, Viewer]:
    backwards = tuple(reversed(shape))
    return math.prod(shape), lambda flat: flat.view(backwards).permute(tuple(reversed(range(len(shape)))))


def _sliced(shape: Sequence[int]) -> tuple[int, Viewer]:
    """A block from the middle of a larger tensor."""
    if not shape:
        return 3, lambda flat: flat[1]
    outer = tuple(size + 2 for size in shape)
    inner = tuple(slice(1, 1 + size) for size in shape)
    return math.prod(outer), lambda flat: flat.view(outer)[inner]


def _every_other(shape: Sequence[int]) -> tuple[int, Viewer]:
    if not shape:
        return 2, lambda flat: flat[::2].view(())
    outer = (*shape[:-1], 2 * shape[-1])
    return math.prod(outer), lambda flat: flat.view(outer)[..., ::2]


def _channels_last(shape: Sequence[int]) -> tuple[int, Viewer]:
    """Dimension 1 varies fastest in memory; without one, every third element."""
    if len(shape) < 2:
        numel = math.prod(shape)
        return 3 * numel, lambda flat: flat[1::3].view(tuple(shape)) if shape else flat[1]
    outer = (shape[0], *shape[2:], shape[1])
    return math.prod(outer), lambda flat: flat.view(outer).movedim(-1, 1)


def _imaginary(shape: Sequence[int]) -> tuple[int, Viewer]:
    """The imaginary parts of conjugates: whoever reads them, negates."""
    return 2 * math.prod(shape), lambda flat: torch.view_as_complex(flat.view((*shape, 2))).conj().imag


def _conjugate(shape: Sequence[int]) -> tuple[int, Viewer]:
    """Dense, but memory holds the conjugates of the elements."""
    return math.prod(shape), lambda flat: flat.view(tuple(shape)).conj()


def _every_other_conjugate(shape: Sequence[int]) -> tuple[int, Viewer]:
    numel, view_of = _every_other(shape)
    return numel, lambda flat: view_of(flat).conj()


LAYOUTS: dict[str, Callable[[Sequence[int]], tuple[int, Viewer]]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "transposed": _transposed,
    "sliced": _sliced,
    "every other": _every_other,
    "channels last": _channels_last,
    "imaginary": _imaginary,
    "conjugate": _conjugate,
    "every other conjugate": _every_other_conjugate,
}


def layouts_of(dtype: torch.dtype) -> list[str]:
    """The layouts that there are for a dtype."""
    lazy = {"imaginary": dtype in (torch.float32, torch.float64), "conjugate": dtype.is_complex}
    return [name for name in LAYOUTS if lazy.get(name.removeprefix("every other "), True)]


@dataclass
class Placement:
    """A tensor in guarded memory: ``raw`` holds GUARD bytes wherever ``tensor`` has no element."""

    raw: torch.Tensor
    tensor: torch.Tensor
    view_of: Viewer = field(repr=False)

    @classmethod
    def make(cls, layout: str, shape: Sequence[int], dtype: torch.dtype) -> Placement:
        numel, view_of = LAYOUTS[layout](shape)
        raw = torch.full((numel * dtype.itemsize,), GUARD, dtype=torch.uint8)
        return cls(raw, view_of(raw.view(dtype)), view_of)

    def is_intact(self) -> bool:
        """Whether nothing but the tensor was written (and, for bool, only bytes 0 and 1 into that)."""
        clean = torch.full_like(self.raw, GUARD)
        self.view_of(clean.view(self.tensor.dtype)).copy_(self.tensor)
        return torch.equal(clean, self.raw)


def values_of(job: Job, rank: int) -> torch.Tensor:
    """The contribution of one rank, 1-D."""
    return draw_values(job.cell, job.numel, job.is_special, (job.seed, rank))


def play(comm: Communicator, jobs: Sequence[Job]) -> list[Outcome]:
    """Runs the jobs on this rank, on poisoned staging memory.

    Raises AssertionError where memory beside the result was written, or the call returned something else.
    """
    return [_play_one(comm, job) for job in jobs]


def _play_one(comm: Communicator, job: Job) -> Outcome:
    cell, values = job.cell, values_of(job, comm.rank)
    source = Placement.make(job.layout_of(comm.rank), job.shape, cell.dtype)
    source.tensor.copy_(values.view(job.shape))
    before = source.raw.clone()
    target = source
    if job.uses_out:
        target = Placement.make(job.layout_of(comm.rank, 1), job.shape, cell.dtype)
    algorithm, order = (None, None) if cell.row == CHOSEN else (ROWS[cell.row].algorithm, ROWS[cell.row].order)
    comm._planner.pool.poison()
    comm.counters.reset()
    call: Any = comm.all_reduce
    options: dict[str, Any] = {"out": target.tensor} if job.uses_out else {}
    if cell.wire is not None:
        options["wire_dtype"] = str(cell.wire).removeprefix("torch.") if job.seed % 2 else cell.wire
    returned = call(source.tensor, cell.op, algorithm, order, async_op=job.is_async, **options)
    returned = returned.wait() if job.is_async else returned
    assert returned is target.tensor
    assert source.is_intact() and target.is_intact(), f"{job}, rank {comm.rank}: memory beside the tensor was written"
    assert target is source or torch.equal(source.raw, before), f"{job}, rank {comm.rank}: the input was changed"
    assert comm.counters.collectives == 1 and comm.last_choice is not None
    choice = comm.last_choice
    result = torch.empty(job.numel, dtype=cell.dtype)
    result.copy_(target.tensor.reshape(-1))
    return Outcome(result, comm.counters.bytes_sent, comm.counters.bytes_received, choice.algorithm, choice.order)


@contextmanager
def poisoned_staging() -> Iterator[None]:
    """Memory that the pools allocate meanwhile is poisoned too, not only what they hold before a call."""
    grown = StagingPool._grown

    def grow(pool: StagingPool, nbytes: int, device: torch.device) -> torch.Tensor:
        generation = pool.generation
        block = grown(pool, nbytes, device)
        if pool.generation != generation:
            pool.poison()
        return block

    with mock.patch.object(StagingPool, "_grown", grow):
        yield

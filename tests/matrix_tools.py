"""How a cell of the matrix is run: its values, the memory that they lie in, and the call. The same in any transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from microddp import Communicator
from microddp.staging import StagingPool
from tests.matrix import CHOSEN, ROWS, Cell, Row, row_of

__all__ = ["LAYOUTS", "Job", "Outcome", "play", "poisoned_staging", "values_of"]

Array = np.ndarray[Any, np.dtype[Any]]
Viewer = Callable[[torch.Tensor], torch.Tensor]

GUARD = 0xA5
_SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])


@dataclass(frozen=True)
class Job:
    """One call of ``all_reduce`` on all ranks.

    Attributes:
        cell: what to combine, and how.
        shape: of the tensors.
        layout: a key of ``LAYOUTS`` for rank 0; further ranks take the next ones if ``layouts_differ``.
        uses_out: the result goes into another tensor.
        is_async: called in the background.
        is_special: floats have NaN, infinities and zeros among them; integers extremes only.
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
    def nbytes(self) -> int:
        return self.numel * self.cell.dtype.itemsize

    def layout_of(self, rank: int, shift: int = 0) -> str:
        names = list(LAYOUTS)
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


LAYOUTS: dict[str, Callable[[Sequence[int]], tuple[int, Viewer]]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "transposed": _transposed,
    "sliced": _sliced,
    "every other": _every_other,
    "channels last": _channels_last,
}


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
    random = np.random.default_rng([job.seed, rank])
    dtype = job.cell.dtype
    if dtype == torch.bool:
        odds = {"bxor": 0.5, **dict.fromkeys(("prod", "min", "band"), 0.9)}.get(job.cell.op, 0.1)
        return torch.from_numpy(random.random(job.numel) < odds)
    if dtype.is_floating_point:
        # NumPy gives an array of one element any stride, and a stride of 0 has no bytes to look at.
        return torch.empty(job.numel, dtype=dtype).copy_(torch.from_numpy(_floats(random, job)))
    return _integers(random, job)


def _floats(random: np.random.Generator, job: Job) -> Array:
    """Over many magnitudes, but so that no partial result leaves the range of any float type."""
    if job.cell.op == "prod":
        values = random.choice([-1.0, 1.0], job.numel) * 2.0 ** random.uniform(-1, 1, job.numel)
    else:
        values = random.standard_normal(job.numel) * 2.0 ** random.uniform(-6, 6, job.numel)
    if job.is_special:
        special = random.random(job.numel) < 0.15
        values[special] = random.choice(_SPECIAL, int(special.sum()))
        values[:1] = -0.0
    return values


def _integers(random: np.random.Generator, job: Job) -> torch.Tensor:
    """Any bits, so that sums and products wrap around; biased where many ranks would leave all zeros or all ones."""
    info = torch.iinfo(job.cell.dtype)
    if job.is_special:
        extremes = torch.tensor([info.min, info.max, 0, 1, info.max - 1], dtype=job.cell.dtype)
        return extremes[torch.from_numpy(random.integers(0, 5, job.numel))]
    several = 3 if job.cell.op in ("band", "bor") else 1
    bits = random.integers(0, 256, (several, job.nbytes), dtype=np.uint8)
    folded = np.bitwise_or.reduce(bits) if job.cell.op == "band" else np.bitwise_and.reduce(bits)
    values = torch.from_numpy(folded).view(job.cell.dtype) if job.numel else torch.empty(0, dtype=job.cell.dtype)
    return values | 1 if job.cell.op == "prod" else values


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
    options = {"out": target.tensor} if job.uses_out else {}
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

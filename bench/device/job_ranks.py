"""What each rank does for part ``ranks``: every algorithm, several types and operators, torch and CuPy arrays.

The numbers are such that every partial result is exact; what must come out is computed by NumPy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import microddp
from bench.device.joint import Agenda, device_of
from bench.device.records import Context
from microddp.cli.bench_data import contribution, expected

__all__ = ["Cell", "cells", "reduce_cell", "run"]

_LARGE: Final = 3 * (1 << 20) + 5
"""Elements: chunks of more than one slice, and a tail."""


@dataclass(frozen=True)
class Cell:
    """One all-reduce.

    Attributes:
        how: "torch", "strided", "stream" (a stream of the caller's), "async", "cupy" (on CuPy's own stream) or "lanes".
    """

    algorithm: str
    dtype: str = "float32"
    op: str = "sum"
    numel: int = 1003
    how: str = "torch"

    @property
    def title(self) -> str:
        """For reports."""
        return f"{self.algorithm} {self.op} {self.dtype}[{self.numel}] {self.how}"


def cells(algorithms: list[str], has_device: bool) -> list[Cell]:
    """The cells, most informative first."""
    every = [Cell(each) for each in algorithms]
    every += [Cell(each, how="cupy") for each in algorithms] if has_device else []
    every += [Cell(each, how="async") for each in algorithms]
    every += [Cell(each, "bfloat16") for each in algorithms]
    every += [Cell(each, numel=_LARGE) for each in algorithms]
    every += [Cell("ring", how=how) for how in (("strided", "stream", "lanes") if has_device else ("strided", "lanes"))]
    every += [Cell("ring", numel=numel) for numel in (0, 1, 2, 17)]
    types = ("float64", "float16", "int32", "int64", "uint8", "bool")
    every += [Cell(name, dtype, "max") for name, dtype in itertools.product(("tree", "direct"), types)]
    every += [Cell(each, op="avg") for each in algorithms]
    every += [Cell("direct", dtype, how="cupy") for dtype in ("float16", "int32", "uint8")] if has_device else []
    return every


def run(context: Context) -> None:
    """All cells that there is time for."""
    names = list(microddp.algorithm_names("all_reduce"))
    agenda = Agenda(context)
    todo = cells(names, not context.stand_in)
    count = agenda.run(todo, lambda cell: cell.title, lambda comm, cell: reduce_cell(context, comm, cell))
    context.note("cells", f"{count} of {len(todo)}")


def reduce_cell(context: Context, comm: Any, cell: Cell) -> str:
    """Does one; returns what is wrong with the result, or ""."""
    if cell.how == "lanes":
        return _reduce_lanes(context, comm, cell)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    source = contribution(comm.rank, cell.numel, dtype, cell.op)
    want = expected(comm.world_size, cell.numel, dtype, cell.op)
    found = _reduced_cupy(comm, cell, source) if cell.how == "cupy" else _reduced(context, comm, cell, source)
    return _difference(found, want.to(dtype))


def _reduced(context: Context, comm: Any, cell: Cell, source: torch.Tensor) -> torch.Tensor:
    """The result, fetched by the stream on which the tensor was made, with no other synchronisation."""
    device = device_of(context)
    options = {"op": cell.op, "algorithm": cell.algorithm}
    if cell.how == "stream":
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            on_side = source.to(device)
            comm.all_reduce(on_side, **options)
            return on_side.cpu()
    if cell.how == "strided":
        wide = torch.zeros(2 * cell.numel, dtype=source.dtype, device=device)
        wide[::2].copy_(source)
        comm.all_reduce(wide[::2], **options)
        assert not bool(wide[1::2].any()), "elements between those of a strided tensor were written"
        return wide[::2].cpu()
    mine = source.to(device, copy=True)
    if cell.how == "async":
        comm.all_reduce(mine, async_op=True, **options).wait()
    else:
        comm.all_reduce(mine, **options)
    return mine.cpu()


def _reduced_cupy(comm: Any, cell: Cell, source: torch.Tensor) -> torch.Tensor:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.asarray(source.numpy())
        comm.all_reduce(array, op=cell.op, algorithm=cell.algorithm)
        return torch.from_numpy(array.get())


def _reduce_lanes(context: Context, comm: Any, cell: Cell) -> str:
    """The largest value of all ranks and the first rank that has it, by argmax of two tensors in lockstep."""
    device = device_of(context)
    rows = [contribution(rank, cell.numel, torch.float32, "max") for rank in range(comm.world_size)]
    value = rows[comm.rank].to(device, copy=True)
    index = torch.full((cell.numel,), comm.rank, dtype=torch.int64, device=device)
    comm.all_reduce((value, index), op="argmax", algorithm=cell.algorithm)
    stacked = np.stack([row.numpy() for row in rows])
    texts = (
        _difference(value.cpu(), torch.from_numpy(stacked.max(axis=0))),
        _difference(index.cpu(), torch.from_numpy(stacked.argmax(axis=0))),
    )
    return "; ".join(text for text in texts if text)


def _difference(found: torch.Tensor, want: torch.Tensor) -> str:
    wrong = torch.ne(found, want).flatten()
    if not bool(wrong.any()):
        return ""
    place = int(wrong.nonzero()[0])
    got, wanted = found.flatten()[place].item(), want.flatten()[place].item()
    return f"{int(wrong.sum())} of {wrong.numel()} elements wrong: [{place}] is {got}, not {wanted}"

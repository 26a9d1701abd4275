"""What a cell must give, in NumPy and closed formulas only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tests.matrix import CHOSEN, FLOATS8, ROWS, Row
from tests.matrix_bounds import too_far
from tests.matrix_folds import Array, Fold, accumulation_of, parts_of, rounded, unlike
from tests.matrix_tools import Job, Outcome, values_of

__all__ = ["check", "check_bytes", "same_bits"]

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_LOGIC: dict[str, Callable[[Array], Any]] = {
    **dict.fromkeys(("sum", "max", "bor"), lambda truth: truth.any(axis=0)),
    **dict.fromkeys(("prod", "min", "band"), lambda truth: truth.all(axis=0)),
    "bxor": lambda truth: truth.sum(axis=0) % 2 == 1,
}


def check(job: Job, outcomes: Sequence[Outcome]) -> None:
    """Compares every rank's result and traffic with what they must be; raises AssertionError."""
    inputs = [values_of(job, rank) for rank in range(len(outcomes))]
    results = [outcome.result for outcome in outcomes]
    row = outcomes[0].row
    assert all(outcome.row is row for outcome in outcomes), f"{job}: the ranks chose differently"
    if job.cell.row == CHOSEN:
        assert row.same_bits, f"{job}: {row.algorithm} must be asked for"
    else:
        assert row is ROWS[job.cell.row], f"{job}: {row.algorithm} ran"
    if row.same_bits or not _rounds(job):
        for rank, result in enumerate(results):
            same = same_bits(results[0], result, nan_is_nan=not row.same_bits)
            assert same, f"{job}: ranks 0 and {rank} of {len(inputs)} end with different bits"
    for rank, result in enumerate(results[:1] if row.same_bits else results):
        wrong = _wrong(job, row, rank, inputs, result)
        where = np.flatnonzero(wrong)[:4]
        if where.size:
            given = [each[where].tolist() for each in inputs]
            got = result[where].tolist()
            raise AssertionError(f"{job}, rank {rank} of {len(inputs)}: {got} at {where} from {given}")
    check_bytes(job, row, outcomes)


def check_bytes(job: Job, row: Row, outcomes: Sequence[Outcome]) -> None:
    """Exact if the size divides by 16 n bytes, or nothing is cut into chunks; else within 16 bytes a chunk.

    Bytes are those of the type that travels; chunks are cut for the smaller of both types.
    """
    world_size = len(outcomes)
    travels, unit = job.cell.travels.itemsize, job.itemsize
    nbytes, slack = job.numel * travels, 16 * travels // unit
    chunk = Fraction(nbytes, world_size) if row.is_chunked else Fraction(nbytes)
    is_exact = not row.is_chunked or job.numel * unit % (16 * world_size) == 0
    wanted_in_all = 0
    for rank, outcome in enumerate(outcomes):
        messages = row.messages(rank, world_size)
        wanted_in_all += messages
        for counted in (outcome.sent, outcome.received):
            off = abs(counted - messages * chunk)
            text = f"{job}, rank {rank} of {world_size}: {counted} bytes, not {float(messages * chunk)}"
            assert off <= (0 if is_exact else slack * messages), text
    sent, received = sum(each.sent for each in outcomes), sum(each.received for each in outcomes)
    assert sent == received == wanted_in_all * chunk, f"{job}: {sent} sent and {received} received in all"
    if row.is_chunked:
        _check_alignment(job, row, outcomes)


def _check_alignment(job: Job, row: Row, outcomes: Sequence[Outcome]) -> None:
    """Every chunk but the last that has elements is a multiple of 16 bytes in the smaller of both types.

    A ring's rank sends all chunks but one, and again; a direct one all but its own, and n - 1 times its own: what it
    sends beyond one or two whole tensors is a multiple of that too, on all ranks but those that are short of the last
    chunk or own it.
    """
    whole = {"ring": 2, "direct": 1}[str(row.algorithm)]
    beyond = [outcome.sent // job.cell.travels.itemsize - whole * job.numel for outcome in outcomes]
    assert sum(each % (16 // job.itemsize) > 0 for each in beyond) <= whole, f"{job}: chunks of any size, {beyond}"


def same_bits(first: torch.Tensor, second: torch.Tensor, *, nan_is_nan: bool = False) -> bool:
    """Bitwise equality; with ``nan_is_nan`` whatever the payload of NaN."""
    if nan_is_nan and _has_parts(first.dtype):
        return not unlike(parts_of(first), parts_of(second)).any()
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _has_parts(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _rounds(job: Job) -> bool:
    """Whether the order may show in the bits."""
    return _has_parts(job.cell.dtype) and (job.cell.op in ("sum", "prod", "avg") or job.cell.wire is not None)


def _wrong(job: Job, row: Row, rank: int, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> Array:
    """True for each element that is not what it must be."""
    op, dtype = job.cell.op, job.cell.dtype
    if len(inputs) == 1:  # nothing travels
        alone: Array = (_bytes(result) != _bytes(inputs[0])).any(axis=1)
        return alone
    if dtype == torch.bool:
        truth = _LOGIC[op](np.stack([each.numpy() for each in inputs]))
        wrong: Array = (_bytes(result) != truth.astype(np.uint8)[:, None]).any(axis=1)
        return wrong
    if not _has_parts(dtype):
        stacked = np.stack([each.numpy() for each in inputs])
        inexact: Array = result.numpy() != _UFUNCS[op].reduce(stacked, axis=0, dtype=stacked.dtype)
        return inexact
    parts, actual = np.stack([parts_of(each) for each in inputs]), parts_of(result)
    wrong = too_far(job.cell, row, parts, actual) | _unfolded(job, row, rank, parts, actual)
    if job.cell.travels.itemsize < dtype.itemsize:
        wrong |= unlike(rounded(actual, job.cell.travels), actual)  # it is a value that can travel
    found: Array = np.logical_or.reduce(wrong)
    return found


def _bytes(tensor: torch.Tensor) -> Array:
    found: Array = tensor.view(torch.uint8).numpy().reshape(tensor.numel(), -1) if tensor.numel() else np.empty((0, 1))
    return found


def _unfolded(job: Job, row: Row, rank: int, parts: Array, actual: Array) -> Array:
    """True where the value is no fold in an order of the algorithm: rounded after each, then to the data's type."""
    cell = job.cell
    means = not row.rank_order and cell.travels in (torch.float16, *FLOATS8)
    wide = max(accumulation_of(cell.dtype), accumulation_of(cell.travels))
    fold = Fold(cell.op, cell.travels, means, list(parts.astype(wide)))
    wrong = np.ones(actual.shape, bool)
    for order in row.orders(rank, len(parts)):
        with np.errstate(over="ignore"):
            expected = rounded(fold.run(order), cell.dtype)
        wrong &= unlike(actual, expected).any(axis=0)
    return wrong

"""What a cell must give, in NumPy and closed formulas only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tests.matrix import CHOSEN, ROWS, Row
from tests.matrix_tools import Job, Outcome, values_of

__all__ = ["check", "check_bytes", "same_bits"]

Array = np.ndarray[Any, np.dtype[Any]]

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
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
_NARROW = (torch.float16, torch.bfloat16)


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
    for rank, result in enumerate(results):
        wrong = _wrong(job, row, inputs, result)
        where = np.flatnonzero(wrong)[:4]
        if where.size:
            given = [each[where].tolist() for each in inputs]
            got = result[where].tolist()
            raise AssertionError(f"{job}, rank {rank} of {len(inputs)}: {got} at {where} from {given}")
    if row.same_bits or not _rounds(job):
        for rank, result in enumerate(results):
            same = same_bits(results[0], result, nan_is_nan=not row.same_bits)
            assert same, f"{job}: ranks 0 and {rank} of {len(inputs)} end with different bits"
    check_bytes(job, row, outcomes)


def check_bytes(job: Job, row: Row, outcomes: Sequence[Outcome]) -> None:
    """Exact if the size divides by 16 n, or nothing is cut into chunks; else within 16 bytes a chunk."""
    world_size = len(outcomes)
    chunk = Fraction(job.nbytes, world_size) if row.is_chunked else Fraction(job.nbytes)
    is_exact = not row.is_chunked or job.nbytes % (16 * world_size) == 0
    wanted_in_all = 0
    for rank, outcome in enumerate(outcomes):
        messages = row.messages(rank, world_size)
        wanted_in_all += messages
        for counted in (outcome.sent, outcome.received):
            off = abs(counted - messages * chunk)
            text = f"{job}, rank {rank} of {world_size}: {counted} bytes, not {float(messages * chunk)}"
            assert off <= (0 if is_exact else 16 * messages), text
    sent, received = sum(each.sent for each in outcomes), sum(each.received for each in outcomes)
    assert sent == received == wanted_in_all * chunk, f"{job}: {sent} sent and {received} received in all"


def same_bits(first: torch.Tensor, second: torch.Tensor, *, nan_is_nan: bool = False) -> bool:
    """Bitwise equality; with ``nan_is_nan`` whatever the payload of NaN."""
    if nan_is_nan and first.dtype.is_floating_point:
        if not torch.equal(first.isnan(), second.isnan()):
            return False
        first, second = first.nan_to_num(0.0, np.inf, -np.inf), second.nan_to_num(0.0, np.inf, -np.inf)
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _rounds(job: Job) -> bool:
    return job.cell.dtype.is_floating_point and job.cell.op in ("sum", "prod", "avg")


def _wrong(job: Job, row: Row, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> Array:
    """True for each element that is not what it must be."""
    op, dtype = job.cell.op, job.cell.dtype
    if len(inputs) == 1:
        return np.not_equal(_bits(result), _bits(inputs[0]))
    if dtype == torch.bool:
        truth = _LOGIC[op](np.stack([each.numpy() for each in inputs]))
        unlike: Array = np.not_equal(_bits(result), truth.astype(np.uint8))
        return unlike
    if not dtype.is_floating_point:
        stacked = np.stack([each.numpy() for each in inputs])
        exact: Array = result.numpy() != _UFUNCS[op].reduce(stacked, axis=0, dtype=stacked.dtype)
        return exact
    stacked = np.stack([each.double().numpy() for each in inputs])
    actual = result.double().numpy()
    if op in ("min", "max"):
        return _unlike(actual, _extreme(stacked, op))
    wrong = _too_far(job, row, stacked, actual)
    if row.rank_order:
        wrong |= _unlike(actual, _left_fold(inputs, op, dtype))
    return wrong


def _bits(tensor: torch.Tensor) -> Array:
    bits: Array = tensor.view(torch.uint8).numpy().reshape(-1, tensor.dtype.itemsize)
    return bits.view(f"u{tensor.dtype.itemsize}").reshape(-1) if bits.size else bits.reshape(-1)


def _unlike(actual: Array, expected: Array) -> Array:
    """True where two float64 arrays differ in value or sign of zero, and are not both NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    differ: Array = ((actual != expected) | (np.signbit(actual) != np.signbit(expected))) & ~both_nan
    return differ


def _extreme(stacked: Array, op: str) -> Array:
    """IEEE 754's minimum and maximum: NaN if there is one, -0.0 below 0.0."""
    found: Array = _UFUNCS[op].reduce(stacked, axis=0)
    negative = np.signbit(stacked) & (stacked == 0)
    positive = ~np.signbit(stacked) & (stacked == 0)
    is_negative = negative.any(axis=0) if op == "min" else ~positive.any(axis=0)
    return np.where(found == 0, np.where(is_negative, -0.0, 0.0), found)


def _left_fold(inputs: Sequence[torch.Tensor], op: str, dtype: torch.dtype) -> Array:
    """((x0 ∘ x1) ∘ x2) ∘ … in the accumulation type, divided there for avg, rounded once."""
    wide = [(each.float() if dtype in _NARROW else each).numpy() for each in inputs]
    with np.errstate(all="ignore"):
        total = wide[0]
        for each in wide[1:]:
            total = _UFUNCS[op](total, each)
        if op == "avg":
            total = total / total.dtype.type(len(wide))
    rounded: Array = torch.from_numpy(np.asarray(total)).to(dtype).double().numpy()
    return rounded


def _too_far(job: Job, row: Row, stacked: Array, actual: Array) -> Array:
    """Off the float64 result by more than hops × ulp × sum|x| (for prod: × |result|)."""
    op, dtype, world_size = job.cell.op, job.cell.dtype, len(stacked)
    info = torch.finfo(dtype)
    if dtype in _NARROW:
        ulps = row.roundings(world_size) * info.eps + row.additions(world_size) * torch.finfo(torch.float32).eps
    else:
        ulps = row.additions(world_size) * info.eps
    with np.errstate(all="ignore"):
        exact = _UFUNCS[op].reduce(stacked, axis=0)
        scale = np.abs(exact) if op == "prod" else np.abs(stacked).sum(axis=0)
        bound = ulps * scale
        if op == "avg":
            exact = exact / world_size
            bound = (bound + info.eps * scale) / world_size + (
                1 + row.roundings(world_size)
            ) * info.smallest_normal * info.eps
        finite = np.isfinite(exact)
        wrong: Array = finite & ~(np.abs(actual - exact) <= bound)
        wrong |= ~finite & _unlike(actual, exact)
    all_negative_zero = (np.signbit(stacked) & (stacked == 0)).all(axis=0)
    if op != "prod":
        wrong |= all_negative_zero & ~(np.signbit(actual) & (actual == 0))
    return wrong

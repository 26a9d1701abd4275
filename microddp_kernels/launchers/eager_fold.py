"""Folds of one tensor with torch's own kernels: ``op.eager``, weighted sums, divisions and scaling, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microddp_kernels.launchers.eager_convert import as_parts, convert, store
from microddp_kernels.reduce_op import CombineSpec
from microddp_kernels.scratch import BLOCK_NUMEL, block_scratch

__all__ = ["fold"]


def fold(out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, accumulation: torch.dtype) -> None:
    """``out = how(operands)`` for 1-D tensors; combines with ``how.op.eager``. ``how.op.finalize`` is not called."""
    numel = out.numel()
    if numel <= BLOCK_NUMEL:
        _fold_block(out, operands, how, accumulation)
        return
    for start in range(0, numel, BLOCK_NUMEL):
        stop = start + BLOCK_NUMEL
        _fold_block(out[start:stop], [operand[start:stop] for operand in operands], how, accumulation)


def _fold_block(
    out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, accumulation: torch.dtype
) -> None:
    """One block of the fold. ``out`` is written once, after every operand has been read, since it may alias any."""
    total = block_scratch("fold total", accumulation, out.numel())
    if how.weights is not None:
        _fold_weighted(total, operands, how.weights, how.scale)
        denominator = sum(how.weights)
    elif len(operands) == 1:
        _fold_one(out, total, operands[0], how)
        return
    elif how.divisor is not None:
        _fold_combined(total, total, operands, how)
        denominator = how.divisor
    elif out.dtype == accumulation:
        _fold_combined(out, total, operands, how)
        return
    else:
        _fold_combined(total, total, operands, how)
        convert(out, total)
        return
    _divide(out, total, denominator)


def _divide(out: torch.Tensor, total: torch.Tensor, denominator: int) -> None:
    if total.dtype.is_complex:  # torch divides complex numbers by another formula, which rounds differently
        out, total = as_parts(out), as_parts(total)
    if out.dtype == total.dtype:
        torch.div(total, denominator, out=out)
    else:
        convert(out, total.div_(denominator))


def _fold_one(out: torch.Tensor, total: torch.Tensor, operand: torch.Tensor, how: CombineSpec) -> None:
    """A single operand, scaled and divided if asked."""
    if how.scale is None and how.divisor is None:
        # What is narrower than the accumulation type is exact in it: nothing is rounded on the way there.
        store(out, operand)
        return
    total.copy_(operand)
    if how.scale is not None:
        total.mul_(how.scale)
    if how.divisor is not None:
        _divide(out, total, how.divisor)
    else:
        convert(out, total)


def _fold_combined(out: torch.Tensor, total: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec) -> None:
    """Folds in ``total``; the last step writes ``out``, which may be ``total``."""
    eager = how.op.eager
    if eager is None:
        raise RuntimeError(f"operator {how.op.name!r} has no eager function to fold with")
    first = operands[0]
    if first.dtype != total.dtype:
        first = total.copy_(first)
    for operand in operands[1:-1]:
        eager(first, _widened(operand, total.dtype), out=total)
        first = total
    eager(first, _widened(operands[-1], total.dtype), out=out)


def _fold_weighted(
    total: torch.Tensor, operands: Sequence[torch.Tensor], weights: Sequence[int], scale: float | None
) -> None:
    """The weighted sum. Product and sum are two calls: ``add(alpha=...)`` contracts them where it is vectorised."""
    total.copy_(operands[0])
    if scale is not None:
        total.mul_(scale)
    total.mul_(weights[0])
    product = block_scratch("fold operand", total.dtype, total.numel())
    for operand, weight in zip(operands[1:], weights[1:], strict=True):
        total.add_(product.copy_(operand).mul_(weight))


def _widened(operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``operand`` in ``dtype``, by way of a buffer: left to torch, a mixed call makes a copy of its own each time."""
    if operand.dtype == dtype:
        return operand
    return block_scratch("fold operand", dtype, operand.numel()).copy_(operand)

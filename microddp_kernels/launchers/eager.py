"""Combines and copies CPU tensors with torch's own kernels: the default launcher there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from microddp_kernels.launchers.base import Launcher
from microddp_kernels.launchers.checks import check_copy, check_devices, check_launch, check_pack
from microddp_kernels.reduce_op import CombineSpec
from microddp_kernels.scratch import BLOCK_NUMEL, block_scratch

__all__ = ["EagerLauncher"]


class EagerLauncher(Launcher):
    """Two operands of one type take one torch call; everything else goes block by block through small buffers.

    So the extra memory of a thread is a few blocks of ``BLOCK_NUMEL`` elements, whatever the size of the tensors.
    """

    name = "eager"

    def combine(self, out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, queue: Any = None) -> None:
        """``out = how(operands)``, done on return; ``queue`` is ignored.

        Raises:
            TypeError, ValueError: see ``microddp_kernels.launchers.checks``.
        """
        if len(operands) == 2 and how.weights is None and how.divisor is None:
            first, second = operands
            op, dtype = how.op, out.dtype
            if (
                first.dtype is dtype
                and second.dtype is dtype
                and dtype in op.dtypes
                and out.numel() == first.numel() == second.numel()
            ):
                op.eager(first, second, out=out)
                return
        accumulation = check_launch(out, operands, how)[0]
        check_devices(self.name, "cpu", out, *operands)
        numel = out.numel()
        if numel <= BLOCK_NUMEL:
            _fold_block(out, operands, how, accumulation)
            return
        for start in range(0, numel, BLOCK_NUMEL):
            stop = start + BLOCK_NUMEL
            _fold_block(out[start:stop], [operand[start:stop] for operand in operands], how, accumulation)

    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Any = None) -> None:
        """``out = source``, done on return; ``queue`` is ignored."""
        check_copy(out, source)
        out.copy_(source)

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor], queue: Any = None) -> None:
        """Puts ``sources`` one after another into ``out``, done on return; ``queue`` is ignored."""
        check_pack(out, sources)
        start = 0
        for source in sources:
            out[start : start + source.numel()].copy_(source.view(-1))
            start += source.numel()

    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor, queue: Any = None) -> None:
        """Cuts ``source`` into ``outs``, done on return; ``queue`` is ignored."""
        check_pack(source, outs)
        start = 0
        for out in outs:
            out.view(-1).copy_(source[start : start + out.numel()])
            start += out.numel()


def _fold_block(
    out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, accumulation: torch.dtype
) -> None:
    """One block of the fold. ``out`` is written once, after every operand has been read, since it may alias any."""
    total = block_scratch("fold total", accumulation, out.numel())
    if how.weights is not None:
        _fold_weighted(total, operands, how.weights)
        denominator = sum(how.weights)
    elif how.divisor is not None:
        _fold_combined(total, total, operands, how)
        denominator = how.divisor
    elif out.dtype == accumulation:
        _fold_combined(out, total, operands, how)
        return
    else:
        _fold_combined(total, total, operands, how)
        out.copy_(total)
        return
    if out.dtype == accumulation:
        torch.div(total, denominator, out=out)
    else:
        out.copy_(total.div_(denominator))


def _fold_combined(out: torch.Tensor, total: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec) -> None:
    """Folds in ``total``; the last step writes ``out``, which may be ``total``."""
    eager = how.op.eager
    first = operands[0]
    if first.dtype != total.dtype:
        first = total.copy_(first)
    for operand in operands[1:-1]:
        eager(first, _widened(operand, total.dtype), out=total)
        first = total
    eager(first, _widened(operands[-1], total.dtype), out=out)


def _fold_weighted(total: torch.Tensor, operands: Sequence[torch.Tensor], weights: Sequence[int]) -> None:
    """The weighted sum. Product and sum are two calls: ``add(alpha=...)`` contracts them where it is vectorised."""
    total.copy_(operands[0]).mul_(weights[0])
    product = block_scratch("fold operand", total.dtype, total.numel())
    for operand, weight in zip(operands[1:], weights[1:], strict=True):
        total.add_(product.copy_(operand).mul_(weight))


def _widened(operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``operand`` in ``dtype``, by way of a buffer: left to torch, a mixed call makes a copy of its own each time."""
    if operand.dtype == dtype:
        return operand
    return block_scratch("fold operand", dtype, operand.numel()).copy_(operand)

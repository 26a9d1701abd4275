"""Folds with functions on whole tensors, which return new ones: of any number of lanes, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from microddp_kernels.launchers.eager_convert import store
from microddp_kernels.launchers.eager_steps import Lanes, Steps
from microddp_kernels.reduce_op import CombineSpec
from microddp_kernels.scratch import BLOCK_NUMEL, block_scratch

__all__ = ["cut", "fold_lanes"]

_MOST_THREADS = 8


def fold_lanes(
    out: Lanes, operands: Sequence[Lanes], how: CombineSpec, steps: Steps, widths: Sequence[int], num_rows: int
) -> int:
    """``out = how(operands)``, for ``num_rows`` rows of ``widths`` elements in each lane.

    A block has as many elements as torch gives to each of its threads at least, for every thread.

    Returns:
        The first row that has not been done since the body could not be evaluated: the caller's task; else
        ``num_rows``. Nothing has been written from there on.
    """
    block_numel = BLOCK_NUMEL * min(torch.get_num_threads(), _MOST_THREADS)
    block = max(1, block_numel // max(widths))
    is_wide = any(lane.wide for lane in how.op.lanes)
    disposable = _disposable(out, operands, steps)
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        whole = start == 0 and stop == num_rows and not is_wide
        blocks = [each if whole else cut(each, widths, start, stop, is_wide) for each in (out, *operands)]
        try:
            _fold_block(blocks[0], blocks[1:], how, steps, disposable)
        except steps.stops as error:
            steps.refuse(str(error))
            return start
    return num_rows


def cut(lanes: Lanes, widths: Sequence[int], start: int, stop: int, is_wide: bool = False) -> Lanes:
    """Rows ``start`` to ``stop`` of each lane; with ``is_wide`` of shape (rows, width)."""
    parts = tuple(lane[start * width : stop * width] for lane, width in zip(lanes, widths, strict=True))
    if is_wide:
        return tuple(part.view(stop - start, width) for part, width in zip(parts, widths, strict=True))
    return parts


def _disposable(out: Lanes, operands: Sequence[Lanes], steps: Steps) -> int | None:
    """The index of the operand that a function may change, since it is exactly ``out`` and nothing else.

    Not where what a function has changed may be needed again: with several lanes, whose results may be swapped, or if
    the interpreter may have to take over.
    """
    if len(out) > 1 or steps.stops:
        return None
    address = out[0].data_ptr()
    found = [index for index, operand in enumerate(operands) if operand[0].data_ptr() == address]
    return found[0] if len(found) == 1 else None


def _fold_block(out: Lanes, operands: Sequence[Lanes], how: CombineSpec, steps: Steps, disposable: int | None) -> None:
    """``out`` is written when everything has been read and computed, since it may alias any operand."""
    writes = steps.combine_writes if len(operands) > 1 else steps.finalize_writes
    total = _loaded("first", operands[0], steps, writes and disposable != 0)
    if how.scale is not None:
        total = _by_parts(torch.mul, total, how.scale)
    for index, operand in enumerate(operands[1:], 1):
        if steps.combine is None:
            raise RuntimeError(f"operator {how.op.name!r} has no function to combine with")
        total = steps.combine(total, _loaded("second", operand, steps, writes and disposable != index))
    if how.divisor is not None:
        total = steps.finalize(total, how.divisor) if steps.finalize else _by_parts(torch.div, total, how.divisor)
    for out_lane, value in zip(out, total, strict=True):
        store(out_lane, value)


def _loaded(use: str, operand: Lanes, steps: Steps, protected: bool) -> Lanes:
    """The operand in the types that the functions take; a copy if it is ``protected``."""
    return tuple(
        block_scratch(f"{use} of lane {lane}", dtype, each.numel()).view(each.shape).copy_(each)
        if protected or each.dtype is not dtype
        else each
        for lane, (each, dtype) in enumerate(zip(operand, steps.dtypes, strict=True))
    )


def _by_parts(function: Callable[..., torch.Tensor], total: Lanes, number: float) -> Lanes:
    """New tensors, of complex ones part by part: torch takes the number for a complex one, with an imaginary 0."""
    return tuple(
        torch.view_as_complex(function(torch.view_as_real(each), number))
        if each.is_complex()
        else function(each, number)
        for each in total
    )

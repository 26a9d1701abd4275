"""The Triton kernel that combines operators with wide lanes. ``@triton.jit`` functions only; launchers run it."""

# mypy: ignore-errors
# (Triton's decorator is untyped, and a kernel's parameters are pointers and constants that no annotation describes.)

from __future__ import annotations

import triton
import triton.language as tl

from microddp_kernels.convert import narrow, widen
from microddp_kernels.fold import combined, finish

__all__ = ["fold_rows_kernel"]


@triton.jit
def _load_rows(
    pointers,
    rows,
    num_rows,
    columns,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    WIDTHS: tl.constexpr,
    LOADS_WIDE: tl.constexpr,
):
    """The values of one operand: blocks of one column of narrow lanes, blocks of ``columns`` of the wide ones."""
    values = ()
    for lane in tl.static_range(len(pointers)):
        if WIDTHS[lane] < 0:
            value = tl.load(pointers[lane] + rows, mask=rows < num_rows)
            values = values + (widen(value, ACC[lane], FORMATS[lane]),)
        elif LOADS_WIDE:
            mask = (rows < num_rows) & (columns < WIDTHS[lane])
            value = tl.load(pointers[lane] + (rows * WIDTHS[lane] + columns), mask=mask)
            values = values + (widen(value, ACC[lane], FORMATS[lane]),)
        else:
            values = values + (tl.zeros((rows.shape[0], columns.shape[1]), ACC[lane]),)
    return values


@triton.jit
def _store_rows(
    pointers,
    values,
    rows,
    num_rows,
    columns,
    FORMATS: tl.constexpr,
    WIDTHS: tl.constexpr,
    STORES_WIDE: tl.constexpr,
    STORES_NARROW: tl.constexpr,
):
    for lane in tl.static_range(len(pointers)):
        value = narrow(values[lane], pointers[lane].dtype.element_ty, FORMATS[lane])
        if WIDTHS[lane] < 0:
            tl.static_assert(
                value.shape[1] == 1,
                "what an operator returns for a lane that is not wide must not depend on wide lanes",
            )
            if STORES_NARROW:
                tl.store(pointers[lane] + rows, value, mask=rows < num_rows)
        elif STORES_WIDE:
            mask = (rows < num_rows) & (columns < WIDTHS[lane])
            whole = tl.broadcast_to(value, (rows.shape[0], columns.shape[1]))
            tl.store(pointers[lane] + (rows * WIDTHS[lane] + columns), whole, mask=mask)


@triton.jit(do_not_specialize=["world_size", "num_rows"])
def fold_rows_kernel(
    outs,
    operands,
    world_size: tl.int32,
    num_rows: tl.int64,
    COMBINE: tl.constexpr,
    FINALIZE: tl.constexpr,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    WIDTHS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    STORES_WIDE: tl.constexpr,
    STORES_NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``outs`` = the fold from the left over ``operands``, finished by ``FINALIZE`` if that is not None.

    A lane has ``num_rows`` elements, or ``num_rows`` rows of ``WIDTHS[lane]`` elements (-1 for lanes that are not
    wide). A program does ``ROWS`` rows and ``COLUMNS`` columns, the combine function gets blocks of shape (ROWS, 1) and
    (ROWS, COLUMNS). Where more than one program works on a row (``COLUMN_BLOCKS`` above 1), a launch with
    ``STORES_WIDE`` and then one with ``STORES_NARROW`` are needed, since ``outs`` may be exactly any operand: the first
    reads what the second overwrites. Masks are the same for whole rows, or for 16 bytes where the width allows, so that
    accesses are as wide as it does.
    """
    program = tl.program_id(0).to(tl.int64)
    rows = (program // COLUMN_BLOCKS) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (program % COLUMN_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    operand = _load_rows(operands[0], rows, num_rows, columns, ACC, FORMATS[1], WIDTHS, STORES_WIDE)
    total = operand
    for index in tl.static_range(1, len(operands)):
        operand = _load_rows(operands[index], rows, num_rows, columns, ACC, FORMATS[index + 1], WIDTHS, STORES_WIDE)
        total = combined(total, operand, COMBINE, ACC, FORMATS[0], False)
    total = finish(total, 0, world_size, FINALIZE, ACC, FORMATS[0], False, False, False)
    _store_rows(outs, total, rows, num_rows, columns, FORMATS[0], WIDTHS, STORES_WIDE, STORES_NARROW)

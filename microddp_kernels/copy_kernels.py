"""The Triton kernels that move elements. ``@triton.jit`` functions only; launchers decide how they run."""

# mypy: ignore-errors
# (Triton's decorator is untyped, and a kernel's parameters are pointers and constants that no annotation describes.)

from __future__ import annotations

import triton
import triton.language as tl

from microddp_kernels.convert import narrow, widen

__all__ = ["copy_kernel", "pack_kernel", "strided_copy_kernel"]

POINTER = tl.constexpr(0)
START = tl.constexpr(1)
NUMEL = tl.constexpr(2)
FIRST_PROGRAM = tl.constexpr(3)
IS_ALIGNED = tl.constexpr(4)


@triton.jit
def _converted(value, TYPE: tl.constexpr, ACC: tl.constexpr, FORMATS: tl.constexpr):
    """``value`` itself if ``ACC`` is None; else by way of the type ``ACC``."""
    if ACC is None:
        return value
    else:
        return narrow(widen(value, ACC, FORMATS[1]), TYPE, FORMATS[0])


@triton.jit(do_not_specialize=["numel"])
def copy_kernel(out, source, numel: tl.int64, ACC: tl.constexpr, FORMATS: tl.constexpr, BLOCK: tl.constexpr):
    """``out = source``, both 1-D contiguous; moved as it is if ``ACC`` is None, else converted."""
    TYPE: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= numel:
        tl.store(out + offsets, _converted(tl.load(source + offsets), TYPE, ACC, FORMATS))
    else:
        mask = offsets < numel
        tl.store(out + offsets, _converted(tl.load(source + offsets, mask=mask), TYPE, ACC, FORMATS), mask=mask)


@triton.jit
def _offsets(rows, columns, row_stride, column_stride, UNIT: tl.constexpr, GRAIN: tl.constexpr):
    """``UNIT`` names the dimension of stride 1; what else is a stride is in units of ``GRAIN``."""
    if UNIT == "columns":
        return rows * (row_stride * GRAIN) + columns
    elif UNIT == "rows":
        return rows + columns * (column_stride * GRAIN)
    else:
        return rows * (row_stride * GRAIN) + columns * (column_stride * GRAIN)


_STRIDED = [
    *("num_rows", "num_columns", "out_row", "out_column", "source_row", "source_column"),
    *(f"{each}_{index}" for each in ("size", "out", "source") for index in range(6)),
]


@triton.jit(do_not_specialize=_STRIDED)
def strided_copy_kernel(
    out,
    source,
    num_rows: tl.int64,
    num_columns: tl.int64,
    out_row: tl.int64,
    out_column: tl.int64,
    source_row: tl.int64,
    source_column: tl.int64,
    size_0: tl.int64,
    size_1: tl.int64,
    size_2: tl.int64,
    size_3: tl.int64,
    size_4: tl.int64,
    size_5: tl.int64,
    out_0: tl.int64,
    out_1: tl.int64,
    out_2: tl.int64,
    out_3: tl.int64,
    out_4: tl.int64,
    out_5: tl.int64,
    source_0: tl.int64,
    source_1: tl.int64,
    source_2: tl.int64,
    source_3: tl.int64,
    source_4: tl.int64,
    source_5: tl.int64,
    ACC: tl.constexpr,
    FORMATS: tl.constexpr,
    NUM_OUTER: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    SOURCE_UNIT: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out = source`` of up to eight dimensions: rows, columns, and ``NUM_OUTER`` others of ``size_i``.

    A program copies a tile of ROWS × COLUMNS at one place in the others. Sizes of rows and columns that have stride 1
    somewhere, and all strides but 1, are handed over divided by ``GRAIN``, which tells the compiler how many elements
    one access may have. See ``copy_kernel`` for ``ACC``.
    """
    sizes = (size_0, size_1, size_2, size_3, size_4, size_5)
    out_strides = (out_0, out_1, out_2, out_3, out_4, out_5)
    source_strides = (source_0, source_1, source_2, source_3, source_4, source_5)
    height = num_rows * GRAIN if OUT_UNIT == "rows" or SOURCE_UNIT == "rows" else num_rows
    width = num_columns * GRAIN if OUT_UNIT == "columns" or SOURCE_UNIT == "columns" else num_columns
    place = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(width, COLUMNS)
    columns = (place % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = place // tiles
    tiles = tl.cdiv(height, ROWS)
    rows = (place % tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    place = place // tiles
    for dim in tl.static_range(NUM_OUTER):
        index = place % sizes[dim]
        place = place // sizes[dim]
        out += index * out_strides[dim] * GRAIN
        source += index * source_strides[dim] * GRAIN
    mask = (rows < height) & (columns < width)
    value = tl.load(source + _offsets(rows, columns, source_row, source_column, SOURCE_UNIT, GRAIN), mask=mask)
    value = _converted(value, out.dtype.element_ty, ACC, FORMATS)
    tl.store(out + _offsets(rows, columns, out_row, out_column, OUT_UNIT, GRAIN), value, mask=mask)


@triton.jit
def _move(flat, part, UNPACKS: tl.constexpr):
    if UNPACKS:
        tl.store(part, tl.load(flat))
    else:
        tl.store(flat, tl.load(part))


@triton.jit
def _move_masked(flat, part, mask, UNPACKS: tl.constexpr):
    if UNPACKS:
        tl.store(part, tl.load(flat, mask=mask), mask=mask)
    else:
        tl.store(flat, tl.load(part, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_parts", "num_halvings"])
def pack_kernel(flat, table, num_parts, num_halvings, UNPACKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Moves many tensors into ``flat``, one after another, or with ``UNPACKS`` out of it.

    ``table`` holds ``num_parts`` int64 each of: the tensors' addresses, their starts in ``flat``, their numel (at least
    1), the first program for each, and whether address and start are multiples of 16 bytes. A program moves ``BLOCKS``
    blocks of one tensor, found by ``num_halvings`` (log2 of ``num_parts``, rounded up) halvings of the table.
    """
    program = tl.program_id(0).to(tl.int64)
    low = tl.full((), 0, tl.int64)
    high = tl.full((), 0, tl.int64) + num_parts
    for _ in range(num_halvings):
        middle = (low + high) // 2
        is_before = tl.load(table + FIRST_PROGRAM * num_parts + middle) <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    part = tl.load(table + POINTER * num_parts + low).to(flat.dtype)
    numel = tl.load(table + NUMEL * num_parts + low)
    is_aligned = tl.load(table + IS_ALIGNED * num_parts + low) != 0
    flat += tl.load(table + START * num_parts + low)
    start = (program - tl.load(table + FIRST_PROGRAM * num_parts + low)) * (BLOCKS * BLOCK)
    if is_aligned & (start + BLOCKS * BLOCK <= numel):
        aligned_flat = tl.multiple_of(flat, 16)
        aligned_part = tl.multiple_of(part, 16)
        for block in tl.static_range(BLOCKS):
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            _move(aligned_flat + offsets, aligned_part + offsets, UNPACKS)
    else:
        for block in tl.static_range(BLOCKS):
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            _move_masked(flat + offsets, part + offsets, offsets < numel, UNPACKS)

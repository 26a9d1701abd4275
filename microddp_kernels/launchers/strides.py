"""How a copy between strided tensors is cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["MAX_DIMS", "Dim", "Tiling", "collapsed", "tiled"]

MAX_DIMS: Final = 8
"""Dimensions that the kernel takes: two of the tile and six others."""

_TILE_EDGE: Final = 32
"""A tile that turns rows into columns has at least this edge, so that either side moves whole sectors of memory."""

Unit = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension: its size, and its strides in the target and in the source, in elements."""

    size: int
    out: int
    source: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """A copy cut into tiles.

    Attributes:
        rows, columns: the dimensions that a tile covers.
        outer: the others.
        out_unit, source_unit: which of rows and columns has stride 1 there, if any.
        grain: 16-byte accesses need sizes and strides that are multiples of their elements; that number, or 1.
        tile: rows and columns of a tile, powers of two.
    """

    rows: Dim
    columns: Dim
    outer: tuple[Dim, ...]
    out_unit: Unit | None
    source_unit: Unit | None
    grain: int
    tile: tuple[int, int]

    @property
    def num_tiles(self) -> int:
        """How many tiles there are in all."""
        count = -(-self.rows.size // self.tile[0]) * -(-self.columns.size // self.tile[1])
        for dim in self.outer:
            count *= dim.size
        return count


def collapsed(shape: tuple[int, ...], out: tuple[int, ...], source: tuple[int, ...]) -> list[Dim]:
    """The dimensions of a copy, the target's densest last, with neighbours merged where they are one run on both sides.

    ``out`` and ``source`` are the strides.
    """
    dims = [Dim(*each) for each in zip(shape, out, source) if each[0] != 1]
    dims.sort(key=lambda dim: (dim.out, dim.source), reverse=True)
    merged: list[Dim] = []
    for dim in dims:
        outer = merged[-1] if merged else None
        if outer is not None and outer.out == dim.out * dim.size and outer.source == dim.source * dim.size:
            merged[-1] = Dim(outer.size * dim.size, dim.out, dim.source)
        else:
            merged.append(dim)
    return merged


def tiled(dims: list[Dim], itemsize: int, block: int) -> Tiling:
    """Cuts a copy of one to ``MAX_DIMS`` dimensions, as ``collapsed`` gives them, into tiles of ``block`` elements.

    The columns of a tile are the target's densest dimension. Its rows are the source's, if that is another one.
    ``itemsize`` is the smaller one of the two sides.
    """
    columns, rest = dims[-1], dims[:-1]
    strided = [dim for dim in rest if dim.source]
    densest = min(strided, key=lambda dim: dim.source, default=None)
    turns = densest is not None and (columns.source == 0 or densest.source < columns.source)
    rows = densest if turns and densest is not None else (rest[-1] if rest else Dim(1, 0, 0))
    outer = tuple(dim for dim in rest if dim is not rows)
    out_unit: Unit | None = "columns" if columns.out == 1 else None
    source_unit: Unit | None = "columns" if columns.source == 1 else "rows" if turns and rows.source == 1 else None
    units: tuple[tuple[Dim, Unit], ...] = ((rows, "rows"), (columns, "columns"))
    counted = [dim.size for dim, name in units if name in (out_unit, source_unit)]
    for unit, strides in (
        (out_unit, (rows.out, columns.out, *(dim.out for dim in outer))),
        (source_unit, (rows.source, columns.source, *(dim.source for dim in outer))),
    ):
        counted += [stride for index, stride in enumerate(strides) if index > 1 or unit != units[index][1]]
    grain = max(16 // itemsize, 1)
    if any(each % grain for each in counted):
        grain = 1
    return Tiling(rows, columns, outer, out_unit, source_unit, grain, _tile(rows.size, columns.size, block, turns))


def _tile(num_rows: int, num_columns: int, block: int, turns: bool) -> tuple[int, int]:
    """Rows and columns of a tile of ``block`` elements, neither more than there are, but for rounding up."""
    most_rows, most_columns = (1 << (size - 1).bit_length() for size in (num_rows, num_columns))
    least_rows = min(most_rows, _TILE_EDGE, block) if turns else 1
    columns = min(most_columns, block // least_rows)
    return min(most_rows, block // columns), columns

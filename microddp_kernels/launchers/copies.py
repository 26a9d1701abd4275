"""The arguments with which the Triton launchers start the kernels that copy."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton.language as tl

from microddp_kernels import copy_kernels
from microddp_kernels.launchers.checks import check_copy
from microddp_kernels.launchers.formats import ACCUMULATION_TYPES, Launch, as_bytes, carried, format_of
from microddp_kernels.launchers.strides import MAX_DIMS, Dim, Tiling, collapsed, tiled

__all__ = ["copy_on_blocks"]

_NO_DIM: Final = Dim(1, 0, 0)


def copy_on_blocks(
    launch: Launch,
    out: torch.Tensor,
    source: torch.Tensor,
    block: int,
    soft_bfloat16: bool = False,
    hardware_float8: bool = False,
) -> None:
    """Checks the arguments of a copy and launches its kernel, unless there is nothing to do.

    Tensors of more than eight dimensions of which none can be merged go by way of dense ones, which torch copies.

    Raises:
        TypeError, ValueError: see ``check_copy``; or elements of ``out`` share memory.
    """
    check_copy(out, source)
    if out.numel() == 0:
        return
    constants = _conversion(out.dtype, source.dtype, soft_bfloat16, hardware_float8)
    if out.dtype == source.dtype:
        target, origin = as_bytes(out), as_bytes(source)
    else:
        target, origin = carried(out, soft_bfloat16), carried(source, soft_bfloat16)
    dims = collapsed(tuple(target.shape), target.stride(), origin.stride())
    if any(dim.out == 0 for dim in dims):
        raise ValueError(f"out has elements that share memory: shape {tuple(out.shape)}, strides {out.stride()}")
    if not dims or dims == [Dim(target.numel(), 1, 1)]:
        numel = target.numel()
        launch(copy_kernels.copy_kernel, -(-numel // block), (target, origin, numel), constants | {"BLOCK": block})
    elif len(dims) <= MAX_DIMS:
        itemsize = min(target.element_size(), origin.element_size())
        _launch_tiles(launch, target, origin, tiled(dims, itemsize, block), constants)
    else:
        dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        copy_on_blocks(launch, dense, source.contiguous(), block, soft_bfloat16, hardware_float8)
        out.copy_(dense)


def _conversion(out: torch.dtype, source: torch.dtype, soft_bfloat16: bool, hardware_float8: bool) -> dict[str, Any]:
    if out == source:
        return {"ACC": None, "FORMATS": None}
    widest = torch.float64 if torch.float64 in (out, source) else torch.float32
    formats = tuple(format_of(each, soft_bfloat16, hardware_float8) for each in (out, source))
    return {"ACC": ACCUMULATION_TYPES[widest], "FORMATS": tuple(tl.constexpr(each) for each in formats)}


def _launch_tiles(
    launch: Launch, out: torch.Tensor, source: torch.Tensor, tiling: Tiling, constants: dict[str, Any]
) -> None:
    grain, rows, columns = tiling.grain, tiling.rows, tiling.columns
    units = (tiling.out_unit, tiling.source_unit)
    outer = tiling.outer + (_NO_DIM,) * (MAX_DIMS - 2 - len(tiling.outer))
    arguments = (
        out,
        source,
        rows.size // grain if "rows" in units else rows.size,
        columns.size // grain if "columns" in units else columns.size,
        *(each // grain for each in (rows.out, columns.out, rows.source, columns.source)),
        *(dim.size for dim in outer),
        *(dim.out // grain for dim in outer),
        *(dim.source // grain for dim in outer),
    )
    constants = constants | {
        "NUM_OUTER": len(tiling.outer),
        "OUT_UNIT": tiling.out_unit,
        "SOURCE_UNIT": tiling.source_unit,
        "GRAIN": grain,
        "ROWS": tiling.tile[0],
        "COLUMNS": tiling.tile[1],
    }
    launch(copy_kernels.strided_copy_kernel, tiling.num_tiles, arguments, constants)

"""The arguments with which the Triton launchers start the kernels that combine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final

import torch
import triton.language as tl

from microddp_kernels import kernels
from microddp_kernels.dtypes import COMPLEX
from microddp_kernels.launchers.checks import check_launch, lanes_of, widths_of
from microddp_kernels.launchers.copies import copy_on_blocks
from microddp_kernels.launchers.formats import ACCUMULATION_TYPES, Launch, carried, format_of
from microddp_kernels.reduce_op import CombineSpec, KernelFunction, ReduceOp, Values
from microddp_kernels.wide_kernels import fold_rows_kernel

__all__ = ["Launch", "combine_on_blocks", "copy_on_blocks"]

_Dtypes = tuple[tuple[torch.dtype, ...], ...]
"""The element types of the lanes of ``out`` and then of each operand."""

_NARROW: Final = -1
"""The width of a lane that is not wide, to kernels, which can compare integers only."""

_THREADS: Final = 128
_FULL_NBYTES, _MOST_NBYTES = 32, 64
"""Bytes that a program may keep for an element, in operands and in the fold, when it does a launcher's whole block:
at ease, and at most, before 16-byte accesses of short types are given up for registers."""


def combine_on_blocks(
    launch: Launch,
    out: Values,
    operands: Sequence[Values],
    how: CombineSpec,
    block: int,
    soft_bfloat16: bool,
    hardware_float8: bool = False,
) -> None:
    """Checks the arguments of a combine and launches its kernel, unless there is nothing to do.

    Args:
        launch: starts a kernel.
        out, operands, how: see ``Launcher.combine``.
        block: elements a program, a power of two; fewer are taken where the values of an element have many bytes.
        soft_bfloat16: convert bfloat16 in integer arithmetic.
        hardware_float8: convert float8 by instructions (sm_89 and later), not in integer arithmetic.
    """
    accumulation = check_launch(out, operands, how)
    outs = lanes_of(out)
    if all(lane.numel() == 0 for lane in outs):
        return
    all_lanes = (outs, *map(lanes_of, operands))
    dtypes = tuple(tuple(lane.dtype for lane in lanes) for lanes in all_lanes)
    is_weighted = how.weights is not None
    constants = _constants(how.op, dtypes, accumulation, is_weighted, block, soft_bfloat16, hardware_float8)
    pointers = tuple(tuple(carried(lane, soft_bfloat16) for lane in lanes) for lanes in all_lanes)
    if any(lane.wide for lane in how.op.lanes):
        _launch_on_rows(launch, pointers, widths_of(how.op, out), how, constants)
        return
    numel = outs[0].numel()
    if dtypes[0][0].is_complex and not constants["IS_COMPLEX"]:
        numel *= 2
    if len(operands) == 2 and not is_weighted and how.divisor is None:
        launch(kernels.combine_kernel, -(-numel // constants["BLOCK"]), (*pointers, numel), constants)
    else:
        _launch_fold(launch, pointers, numel, how, constants)


def _launch_fold(
    launch: Launch, pointers: tuple[Any, ...], numel: int, how: CombineSpec, constants: dict[str, Any]
) -> None:
    """Launches the kernel for any number of operands and whatever ends a fold."""
    finalize = how.op.finalize if how.divisor is not None else None
    world_size = how.divisor if how.weights is None else sum(how.weights)
    constants = constants | {
        "FINALIZE": _loaded(finalize),
        "WEIGHTED": how.weights is not None,
        "SCALED": how.scale is not None,
        "DIVIDES": world_size is not None and finalize is None,
    }
    # Triton compiles a kernel anew for an integer in a tuple that is 1 or divides by 16, but not for a float.
    weights = tuple(float(count) for count in how.weights or ())
    scale = _bits_of_float(1.0 if how.scale is None else how.scale)
    arguments = (pointers[0], pointers[1:], weights, scale, world_size or 1, numel)
    launch(kernels.fold_kernel, -(-numel // constants["BLOCK"]), arguments, constants)


def _launch_on_rows(
    launch: Launch, pointers: tuple[Any, ...], widths: tuple[int, ...], how: CombineSpec, constants: dict[str, Any]
) -> None:
    """Launches the kernel for wide lanes: once, or twice where rows are too wide for one program."""
    wide = tuple(width if lane.wide else None for lane, width in zip(how.op.lanes, widths))
    # Rows that do not start at multiples of 16 bytes are read element by element, which takes more registers.
    is_odd = any(width is not None and width * each.itemsize % 16 for each, width in zip(pointers[0], wide))
    block = max(constants["BLOCK"] // 2, 1) if is_odd else constants["BLOCK"]
    widest = max((width for width in wide if width is not None), default=0)
    num_rows = next(each.numel() for each, width in zip(pointers[0], wide) if width is None)
    columns = min(1 << max(widest - 1, 0).bit_length(), block)
    rows, column_blocks = block // columns, max(-(-widest // columns), 1)
    kept = ("COMBINE", "ACC", "FORMATS")
    constants = {name: constants[name] for name in kept} | {
        "FINALIZE": _loaded(how.op.finalize if how.divisor is not None else None),
        "WIDTHS": _constexpr(tuple(_NARROW if width is None else width for width in wide)),
        "ROWS": rows,
        "COLUMNS": columns,
    }
    arguments = (pointers[0], pointers[1:], how.divisor or 1, num_rows)
    row_blocks = -(-num_rows // rows)
    if column_blocks == 1:
        constants |= {"COLUMN_BLOCKS": 1, "STORES_WIDE": True, "STORES_NARROW": True}
        launch(fold_rows_kernel, row_blocks, arguments, constants)
        return
    first = constants | {"COLUMN_BLOCKS": column_blocks, "STORES_WIDE": True, "STORES_NARROW": False}
    launch(fold_rows_kernel, row_blocks * column_blocks, arguments, first)
    second = constants | {"COLUMN_BLOCKS": 1, "STORES_WIDE": False, "STORES_NARROW": True}
    launch(fold_rows_kernel, -(-num_rows // block), arguments, second | {"ROWS": block, "COLUMNS": 1})


@lru_cache(maxsize=1024)
def _constants(
    op: ReduceOp,
    dtypes: _Dtypes,
    accumulation: tuple[torch.dtype, ...],
    is_weighted: bool,
    block: int,
    soft_bfloat16: bool,
    hardware_float8: bool,
) -> dict[str, Any]:
    """What the combining kernels are compiled for. The dictionary is shared: it is not to be changed."""
    types = tuple(ACCUMULATION_TYPES[each] for each in accumulation)
    formats = tuple(tuple(format_of(each, soft_bfloat16, hardware_float8) for each in lanes) for lanes in dtypes)
    combine, is_bare = op.combine, not op.lanes
    if op.lanes and not COMPLEX.isdisjoint(accumulation):
        raise TypeError(f"operator {op.name!r} has several lanes: Triton kernels take no complex elements there")
    is_complex = accumulation[0].is_complex and op.complex_combine is not None and not is_weighted
    if is_complex:
        combine, is_bare = op.complex_combine, False
        types, formats = types * 2, tuple(lanes * 2 for lanes in formats)
    return {
        "COMBINE": _loaded(combine),
        "ACC": _constexpr(types),
        "FORMATS": _constexpr(formats),
        "IS_BARE": is_bare,
        "IS_COMPLEX": is_complex,
        "BLOCK": _fitted(op, block, dtypes, accumulation),
    }


def _fitted(op: ReduceOp, block: int, dtypes: _Dtypes, accumulation: tuple[torch.dtype, ...]) -> int:
    """``block``, halved until what a program keeps fits its registers, but not below 16 bytes a thread if it can be."""
    has_wide = any(lane.wide for lane in op.lanes)
    counted = [index for index in range(op.num_lanes) if not has_wide or op.lanes[index].wide]
    sizes = [lanes[index].itemsize for lanes in (accumulation, *dtypes[1:]) for index in counted]
    shortest = min(lanes[index].itemsize for lanes in dtypes for index in counted)
    nbytes = sum(sizes)
    if len(dtypes) > 4 and not accumulation[0].is_floating_point and dtypes[0][0].itemsize == 2:
        # Minima and maxima of two in a register spill otherwise, on sm_90 and sm_100.
        block = min(block, max(block // 2, _THREADS * 8))
    for limit, least in ((_FULL_NBYTES, _THREADS * 16 // shortest), (_MOST_NBYTES, _THREADS * 4)):
        while nbytes > limit and block > least:
            block, nbytes = block // 2, nbytes // 2
    return block


def _constexpr(value: Any) -> Any:
    """A tuple of constants: Triton before 3.7 takes what lies bare in a tuple for values of the kernel."""
    if isinstance(value, tuple):
        return tuple(_constexpr(each) for each in value)
    return tl.constexpr(value)


def _loaded(function: Any) -> Any:
    return _imported(function) if isinstance(function, KernelFunction) else function


@cache
def _imported(reference: KernelFunction) -> Any:
    return reference.load()


def _bits_of_float(value: float) -> int:
    """The bits of a float64 as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits

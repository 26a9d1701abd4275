"""The arguments with which the Triton launchers start the kernels that combine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final

import torch

from microddp_kernels import kernels
from microddp_kernels.dtypes import COMPLEX
from microddp_kernels.launchers.checks import check_launch, lanes_of
from microddp_kernels.launchers.copies import copy_on_blocks
from microddp_kernels.launchers.formats import ACCUMULATION_TYPES, Launch, carried, format_of
from microddp_kernels.reduce_op import CombineSpec, KernelFunction, ReduceOp, Values

__all__ = ["Launch", "combine_on_blocks", "copy_on_blocks"]

_FULL_NBYTES: Final = 8
"""Bytes of the values of an element for which a launcher's block is meant."""


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
        block: elements a program, a power of two; less is taken if the values of an element have more than 8 bytes.
        soft_bfloat16: convert bfloat16 in integer arithmetic.
        hardware_float8: convert float8 by instructions (sm_89 and later), not in integer arithmetic.
    """
    accumulation = check_launch(out, operands, how)
    outs, numel = lanes_of(out), lanes_of(out)[0].numel()
    if numel == 0:
        return
    all_lanes = (outs, *map(lanes_of, operands))
    dtypes = tuple(tuple(lane.dtype for lane in lanes) for lanes in all_lanes)
    constants = _constants(how.op, dtypes, accumulation, how.weights is not None, soft_bfloat16, hardware_float8)
    constants = constants | {"BLOCK": _fitted(block, accumulation)}
    if dtypes[0][0].is_complex and not constants["IS_COMPLEX"]:
        numel *= 2
    pointers = tuple(tuple(carried(lane, soft_bfloat16) for lane in lanes) for lanes in all_lanes)
    num_programs = -(-numel // constants["BLOCK"])
    if len(operands) == 2 and how.weights is None and how.divisor is None:
        launch(kernels.combine_kernel, num_programs, (*pointers, numel), constants)
        return
    finalize = how.op.finalize if how.divisor is not None else None
    world_size = how.divisor if how.weights is None else sum(how.weights)
    constants |= {
        "FINALIZE": _loaded(finalize),
        "WEIGHTED": how.weights is not None,
        "SCALED": how.scale is not None,
        "DIVIDES": world_size is not None and finalize is None,
    }
    # Triton compiles a kernel anew for an integer in a tuple that is 1 or divides by 16, but not for a float.
    weights = tuple(float(count) for count in how.weights or ())
    arguments = (pointers[0], pointers[1:], weights, _bits_of_float(how.scale or 0.0), world_size or 1, numel)
    launch(kernels.fold_kernel, num_programs, arguments, constants)


@lru_cache(maxsize=1024)
def _constants(
    op: ReduceOp,
    dtypes: tuple[tuple[torch.dtype, ...], ...],
    accumulation: tuple[torch.dtype, ...],
    is_weighted: bool,
    soft_bfloat16: bool,
    hardware_float8: bool,
) -> dict[str, Any]:
    """What both combining kernels are compiled for; ``dtypes`` of the lanes of ``out`` and of each operand."""
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
        "ACC": types,
        "FORMATS": formats,
        "IS_BARE": is_bare,
        "IS_COMPLEX": is_complex,
    }


@cache
def _fitted(block: int, accumulation: tuple[torch.dtype, ...]) -> int:
    """``block``, halved until the values of a program are no more than those of a block of 8-byte elements."""
    nbytes = sum(each.itemsize for each in accumulation)
    while block > 1 and nbytes > _FULL_NBYTES:
        block, nbytes = block // 2, nbytes // 2
    return block


def _loaded(function: Any) -> Any:
    return _imported(function) if isinstance(function, KernelFunction) else function


@cache
def _imported(reference: KernelFunction) -> Any:
    return reference.load()


def _bits_of_float(value: float) -> int:
    """The bits of a float64 as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits

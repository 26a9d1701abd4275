"""The lanes of a call: their shapes, the types in which they travel, and how many rows make a slice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from microddp.schedule.chunks import alignment_numel
from microddp.staging import LaneTypes
from microddp_kernels.dtypes import dtype_names
from microddp_kernels.reduce_op import ReduceOp

__all__ = [
    "lane_types",
    "lane_widths",
    "row_nbytes_of",
    "rows_of",
    "slice_of",
    "types_text",
    "unit_of",
    "wire_dtype_of",
]


def rows_of(op: ReduceOp | None, tensors: Sequence[torch.Tensor], name: str) -> tuple[int, ...]:
    """The shape that the lanes have in common: a wide lane has further dimensions behind it.

    Raises:
        ValueError: the shapes do not fit.
    """
    if op is None or not op.lanes:
        return tuple(tensors[0].shape)
    shape = next(tuple(tensor.shape) for lane, tensor in zip(op.lanes, tensors) if not lane.wide)
    for number, (lane, tensor) in enumerate(zip(op.lanes, tensors)):
        found = tuple(tensor.shape)
        fits = found[: len(shape)] == shape and math.prod(found[len(shape) :]) > 0 if lane.wide else found == shape
        if not fits:
            wanted = f"{shape} and further dimensions" if lane.wide else f"{shape}, as the other lanes"
            raise ValueError(f"{name}[{number}] (lane {lane.name!r} of {op.name!r}) has shape {found}, not {wanted}")
    return shape


def lane_widths(op: ReduceOp | None, tensors: Sequence[torch.Tensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements each lane has for each element of ``shape``."""
    if op is None or not op.lanes:
        return (1,) * len(tensors)
    return tuple(math.prod(tensor.shape[len(shape) :]) if lane.wide else 1 for lane, tensor in zip(op.lanes, tensors))


def wire_dtype_of(wire: Any, op: ReduceOp, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The type that travels, if it is another than the data's, else None.

    Args:
        wire: a torch dtype, or its name.

    Raises:
        TypeError: not a dtype; either type is no float; the operator has several lanes, or no meaning on it; or what
            is computed in float64 would be stored or travel in 16 bits or fewer, which would round twice.
    """
    if wire is None:
        return None
    found = getattr(torch, wire, None) if isinstance(wire, str) else wire
    if not isinstance(found, torch.dtype):
        raise TypeError(f"wire_dtype must be a torch dtype or the name of one, not {wire!r}")
    if op.lanes:
        raise TypeError(f"operator {op.name!r} has {op.num_lanes} lanes, which travel as they are: no wire_dtype")
    data = dtypes[0]
    if found == data:
        return None
    if not (found.is_floating_point and data.is_floating_point):
        raise TypeError(
            f"wire_dtype converts between floats only: x is {dtype_names([data])}, not {dtype_names([found])}"
        )
    op.check_dtype(found)
    folded = {op.accumulation_dtype(each) for each in (data, found)}
    if torch.float64 in folded and min(data.itemsize, found.itemsize) <= 2:
        why = f"{op.name!r} folds in float64, and that" if torch.float64 not in (data, found) else "it"
        raise TypeError(f"{dtype_names([data])} cannot travel as {dtype_names([found])}: {why} would be rounded twice")
    return found


def lane_types(
    op: ReduceOp | None, dtypes: Sequence[torch.dtype], widths: Sequence[int], wire: torch.dtype | None
) -> tuple[LaneTypes, ...]:
    """The types of each lane."""
    found = []
    for dtype, width in zip(dtypes, widths):
        travels = wire or dtype
        # In rank order all operands are of the type that travels: launchers fold them in its accumulation type.
        wide = travels if op is None else op.accumulation_dtype(travels)
        found.append(LaneTypes(dtype, travels, wide, width))
    return tuple(found)


def unit_of(types: Sequence[LaneTypes]) -> int:
    """The bytes of the smallest element: chunks that are aligned for it are aligned in every lane and type."""
    return min(min(each.data.itemsize, each.wire.itemsize) for each in types)


def slice_of(types: Sequence[LaneTypes], slice_nbytes: int) -> tuple[int, int]:
    """A slice of about ``slice_nbytes`` bytes over all lanes: (what to lower with, the bytes that it really has).

    Plans count rows, in units of the smallest element; see ``LoweringConfig.slice_nbytes``.
    """
    unit, row_nbytes = unit_of(types), row_nbytes_of(types)
    aligned = alignment_numel(unit)
    rows = -(-slice_nbytes // (row_nbytes * aligned)) * aligned
    return rows * unit, rows * row_nbytes


def row_nbytes_of(types: Sequence[LaneTypes]) -> int:
    """The bytes of one row over all lanes, as they travel."""
    return sum(each.width * each.wire.itemsize for each in types)


def types_text(types: Sequence[LaneTypes]) -> str:
    """The types of a call, for headers and messages: "float32", "float32 as bfloat16", "float32, 64 x float32"."""
    texts = []
    for each in types:
        text = dtype_names([each.data])
        if each.wire != each.data:
            text += f" as {dtype_names([each.wire])}"
        texts.append(f"{each.width} x {text}" if each.width != 1 else text)
    return ", ".join(texts)

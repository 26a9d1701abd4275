"""What every launcher refuses, in the same words, and the types in which every launcher computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

from microddp_kernels.dtypes import dtype_names
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["check_copy", "check_devices", "check_launch", "check_pack", "lanes_of", "widths_of"]

_MAX_COUNT: Final = 2**24
"""Up to here float32 holds every integer, so that no launcher rounds a count."""


def lanes_of(values: Values) -> tuple[torch.Tensor, ...]:
    """The tensors of an operand, one a lane."""
    return values if isinstance(values, tuple) else (values,)


def widths_of(op: ReduceOp, values: Values) -> tuple[int, ...]:
    """For each lane of an operand, how many elements it has a row; all 1 if no lane is wide."""
    lanes = lanes_of(values)
    if not any(lane.wide for lane in op.lanes):
        return (1,) * len(lanes)
    rows = _num_rows(op, lanes)
    return tuple(tensor.numel() // rows if lane.wide and rows else 1 for lane, tensor in zip(op.lanes, lanes))


def check_launch(out: Values, operands: Sequence[Values], how: CombineSpec) -> tuple[torch.dtype, ...]:
    """Returns the accumulation type of each lane of a combine.

    Raises:
        TypeError: the operator has no meaning on an element type, or the element types do not go together.
        ValueError: no operand, another number of lanes than the operator's, numel that do not fit, a layout other than
            1-D contiguous, or weights, a divisor or a scale that make no sense.
    """
    op = how.op
    if not operands:
        raise ValueError("combine takes one or more operands, got none")
    all_lanes = [lanes_of(each) for each in (out, *operands)]
    for lanes in all_lanes:
        if len(lanes) != op.num_lanes:
            raise ValueError(f"operator {op.name!r} takes {op.num_lanes} lanes, got {len(lanes)}")
        for tensor in lanes:
            if tensor.dim() != 1 or not tensor.is_contiguous():
                shape, strides = tuple(tensor.shape), tensor.stride()
                raise ValueError(f"combine takes 1-D contiguous tensors, got shape {shape}, strides {strides}")
    _check_sizes(op, all_lanes)
    _check_scaling(how, len(operands))
    types = tuple(
        _accumulation_dtype(op, lane, out_lane.dtype, tuple(each[lane].dtype for each in all_lanes[1:]))
        for lane, out_lane in enumerate(all_lanes[0])
    )
    divided = how.weights is not None or (how.divisor is not None and op.finalize is None) or how.scale is not None
    if divided and not (types[0].is_floating_point or types[0].is_complex):
        dtype = dtype_names([all_lanes[0][0].dtype])
        raise TypeError(f"operator {op.name!r}: only floats are weighted, scaled or divided, not {dtype}")
    return types


def _num_rows(op: ReduceOp, lanes: Sequence[torch.Tensor]) -> int:
    return next(tensor.numel() for lane, tensor in zip(op.lanes, lanes) if not lane.wide)


def _check_sizes(op: ReduceOp, all_lanes: Sequence[Sequence[torch.Tensor]]) -> None:
    wanted = [tensor.numel() for tensor in all_lanes[0]]
    for lanes in all_lanes[1:]:
        found = [tensor.numel() for tensor in lanes]
        if found != wanted:
            one = len(found) == 1
            raise ValueError(
                f"out has {wanted[0] if one else wanted} elements, an operand {found[0] if one else found}"
            )
    if not op.lanes:
        return
    rows = _num_rows(op, all_lanes[0])
    for lane, numel in zip(op.lanes, wanted):
        fits = (numel % rows == 0 if rows else numel == 0) if lane.wide else numel == rows
        if not fits:
            kind = "a whole multiple of" if lane.wide else "the same as"
            raise ValueError(f"lane {lane.name!r} has {numel} elements, which is not {kind} the other lanes' {rows}")


def _check_scaling(how: CombineSpec, num_operands: int) -> None:
    weights, divisor = how.weights, how.divisor
    if weights is not None and (divisor is not None or how.op.lanes):
        raise ValueError("a combine takes weights or a divisor, not both, and weights for one lane only")
    if weights is not None and (len(weights) != num_operands or min(weights) < 1):
        raise ValueError(f"{num_operands} operands take {num_operands} weights of at least 1, got {weights}")
    if weights is not None and sum(weights) > _MAX_COUNT:
        raise ValueError(f"weights must add up to at most {_MAX_COUNT}, got {weights}")
    if divisor is not None and not 1 <= divisor <= _MAX_COUNT:
        raise ValueError(f"divisor must be from 1 to {_MAX_COUNT}, got {divisor}")
    if divisor is not None and how.op.lanes and how.op.finalize is None:
        raise ValueError(f"operator {how.op.name!r} has several lanes and no finalize: there is nothing to divide")
    if how.scale is not None and (num_operands != 1 or how.op.lanes):
        raise ValueError(f"a scale is for one operand of one lane, got {num_operands} of {how.op.num_lanes}")


@lru_cache(maxsize=1024)
def _accumulation_dtype(op: ReduceOp, lane: int, out: torch.dtype, operands: tuple[torch.dtype, ...]) -> torch.dtype:
    dtypes = {out, *operands}
    for dtype in dtypes:
        op.check_dtype(dtype, lane)
    if len(dtypes) > 1 and not all(dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"only floats combine with other types, got {dtype_names(dtypes)}")
    accumulation = op.accumulation_dtype(out)
    for dtype in operands:
        other = op.accumulation_dtype(dtype)
        accumulation = other if other.itemsize > accumulation.itemsize else accumulation
    if accumulation == torch.float64 and out.is_floating_point and out.itemsize <= 2:
        # Machines go from float64 to 16 bits by way of float32 or not; only one of the two rounds once.
        raise TypeError(f"a float64 operand cannot be combined into {dtype_names([out])}: it would be rounded twice")
    return accumulation


def check_copy(out: torch.Tensor, source: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless ``source`` can be copied to ``out``, element by element."""
    if out.dtype != source.dtype:
        if not (out.dtype.is_floating_point and source.dtype.is_floating_point):
            found = f"out is {dtype_names([out.dtype])}, source {dtype_names([source.dtype])}"
            raise TypeError(f"copy converts between floats only: {found}")
        if source.dtype == torch.float64 and out.dtype.itemsize <= 2:
            raise TypeError(f"float64 cannot be copied to {dtype_names([out.dtype])}: it would be rounded twice")
    if out.shape != source.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, source {tuple(source.shape)}")


def check_pack(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Raises TypeError or ValueError unless the contiguous ``parts`` fill the 1-D ``flat`` exactly."""
    if flat.dim() != 1 or not all(each.is_contiguous() for each in (flat, *parts)):
        raise ValueError("pack and unpack take contiguous tensors and one that is 1-D")
    dtypes = {flat.dtype, *(each.dtype for each in parts)}
    if len(dtypes) > 1:
        raise TypeError(f"pack and unpack take tensors of one element type, got {dtype_names(dtypes)}")
    numel = sum(each.numel() for each in parts)
    if numel != flat.numel():
        raise ValueError(f"the tensors have {numel} elements in all, the packed one {flat.numel()}")


def check_devices(launcher: str, device_type: str, *tensors: torch.Tensor) -> None:
    """Raises ValueError unless all tensors are on one device of the type that the launcher works on."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != device_type:
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"the {launcher} launcher works on tensors of one {device_type} device, got {found}")

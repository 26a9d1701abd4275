"""What every launcher refuses, in the same words, and the type in which every launcher computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

from microddp_kernels.reduce_op import CombineSpec, ReduceOp, dtype_names

__all__ = ["check_copy", "check_devices", "check_launch"]

_MAX_COUNT: Final = 2**24
"""Up to here float32 holds every integer, so that no launcher rounds a count."""


def check_launch(out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec) -> torch.dtype:
    """Returns the accumulation type of a combine.

    Raises:
        TypeError: the operator has no meaning on an element type, or the element types do not go together.
        ValueError: fewer than two operands, different numel, a layout other than 1-D contiguous, or weights or a
            divisor that make no sense.
    """
    if len(operands) < 2:
        raise ValueError(f"combine takes two or more operands, got {len(operands)}")
    numel = out.numel()
    for tensor in (out, *operands):
        if tensor.numel() != numel:
            raise ValueError(f"out has {numel} elements, an operand {tensor.numel()}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"combine takes 1-D contiguous tensors, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
    _check_scaling(how, len(operands))
    accumulation = _accumulation_dtype(how.op, out.dtype, tuple(operand.dtype for operand in operands))
    if (how.weights is not None or how.divisor is not None) and not accumulation.is_floating_point:
        raise TypeError(
            f"operator {how.op.name!r}: only floats are weighted or divided, not {dtype_names([out.dtype])}"
        )
    return accumulation


def _check_scaling(how: CombineSpec, num_operands: int) -> None:
    weights, divisor = how.weights, how.divisor
    if weights is not None and divisor is not None:
        raise ValueError("a combine takes weights or a divisor, not both")
    if weights is not None and (len(weights) != num_operands or min(weights) < 1):
        raise ValueError(f"{num_operands} operands take {num_operands} weights of at least 1, got {weights}")
    if weights is not None and sum(weights) > _MAX_COUNT:
        raise ValueError(f"weights must add up to at most {_MAX_COUNT}, got {weights}")
    if divisor is not None and not 1 <= divisor <= _MAX_COUNT:
        raise ValueError(f"divisor must be from 1 to {_MAX_COUNT}, got {divisor}")


@lru_cache(maxsize=1024)
def _accumulation_dtype(op: ReduceOp, out: torch.dtype, operands: tuple[torch.dtype, ...]) -> torch.dtype:
    dtypes = {out, *operands}
    for dtype in dtypes:
        op.check_dtype(dtype)
    if len(dtypes) > 1 and not all(dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"only floats combine with other types, got {dtype_names(dtypes)}")
    accumulation = op.accumulation_dtype(out)
    for dtype in operands:
        accumulation = torch.promote_types(accumulation, op.accumulation_dtype(dtype))
    if accumulation == torch.float64 and out.itemsize == 2:
        # Machines go from float64 to 16 bits by way of float32 or not; only one of the two rounds once.
        raise TypeError(f"a float64 operand cannot be combined into {dtype_names([out])}: it would be rounded twice")
    return accumulation


def check_copy(out: torch.Tensor, source: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless ``source`` can be copied to ``out`` byte by byte."""
    if out.dtype != source.dtype:
        raise TypeError(
            f"copy does not convert: out is {dtype_names([out.dtype])}, source {dtype_names([source.dtype])}"
        )
    if out.numel() != source.numel():
        raise ValueError(f"out has {out.numel()} elements, source {source.numel()}")


def check_devices(launcher: str, device_type: str, *tensors: torch.Tensor) -> None:
    """Raises ValueError unless all tensors are on one device of the type that the launcher works on."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != device_type:
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"the {launcher} launcher works on tensors of one {device_type} device, got {found}")

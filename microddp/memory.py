"""Which tensors share memory, with themselves and with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

__all__ = ["overlaps_itself", "same_memory", "shares_memory"]

_MAX_WORK: Final = 100_000
"""Candidates that are considered: the question is a bounded Diophantine equation, hard if there are many dimensions."""


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor are stored in one place (an expanded dimension, say). Exact."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    if tensor.numel() < 2:
        return False
    reach = 0  # how far the dimensions so far reach
    for stride, size in dims:
        if stride == 0:
            return True
        if stride <= reach:  # they interleave or overlap: count the places
            return bool(_offsets(tensor).unique().numel() < tensor.numel())
        reach += stride * (size - 1)
    return False


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have every element in the same place."""
    if first is second:
        return True
    same_type = first.shape == second.shape and first.dtype == second.dtype and _lazy(first) == _lazy(second)
    if not same_type or first.data_ptr() != second.data_ptr() or first.device != second.device:
        return False
    strides = zip(first.shape, first.stride(), second.stride())
    return all(one == other for size, one, other in strides if size > 1)


def shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common. Exact; what cannot be told in milliseconds counts as shared."""
    if not first.numel() or not second.numel() or first.device != second.device:
        return False
    (first_start, first_stop), (second_start, second_stop) = _extent(first), _extent(second)
    if first_stop <= second_start or second_stop <= first_start:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    try:
        # The stub knows of fewer values of max_work than the function takes.
        return bool(np.shares_memory(_place(first), _place(second), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


@dataclass(frozen=True, slots=True)
class _ArrayInterface:
    __array_interface__: dict[str, Any]


def _place(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of the same addresses, to ask about and never to read: they may be a GPU's."""
    nbytes = tensor.element_size()
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * nbytes for stride in tensor.stride()),
        "typestr": f"|V{nbytes}",
    }
    return np.asarray(_ArrayInterface(interface))


def _lazy(tensor: torch.Tensor) -> tuple[bool, bool]:
    """What is still to be done to its elements when they are read."""
    return tensor.is_neg(), tensor.is_conj()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _offsets(tensor: torch.Tensor) -> torch.Tensor:
    """The offset of each element from the first, in elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.reshape(-1)

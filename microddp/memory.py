"""Which tensors share memory, with themselves and with each other."""

from __future__ import annotations

import torch

__all__ = ["overlaps_itself", "same_memory", "shares_memory"]


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
    """Whether two tensors have a byte in common. Exact, but that elements of different sizes count as overlapping
    wherever the stretches of memory that the two tensors span do.
    """
    if not first.numel() or not second.numel() or first.device != second.device:
        return False
    (first_start, first_stop), (second_start, second_stop) = _extent(first), _extent(second)
    if first_stop <= second_start or second_stop <= first_start:
        return False
    if (first.is_contiguous() and second.is_contiguous()) or first.element_size() != second.element_size():
        return True
    distance = second.data_ptr() - first.data_ptr()
    if distance % first.element_size():
        return True
    moved = _offsets(second) + distance // first.element_size()
    return bool(torch.isin(moved, _offsets(first)).any())


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

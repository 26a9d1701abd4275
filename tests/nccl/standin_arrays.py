"""CuPy arrays without a GPU: real ``cupy.ndarray`` over the memory of CPU tensors, and tensors over theirs.

Pointer, shape, strides and dtype are real. What asks a driver does not work: DLPack, ``__cuda_array_interface__``, any
arithmetic. ``as_tensor`` stands for DLPack in tests.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

__all__ = ["as_cupy", "as_tensor"]


def as_cupy(tensor: torch.Tensor) -> Any:
    """A ``cupy.ndarray`` over the CPU tensor's memory, same shape, strides and type; it keeps the tensor alive.

    Raises:
        TypeError: the type is not one of NumPy's (bfloat16, float8).
    """
    import cupy

    try:
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    except TypeError:
        raise TypeError(f"CuPy has no type for {tensor.dtype}") from None
    storage = tensor.untyped_storage()
    memory = cupy.cuda.UnownedMemory(storage.data_ptr(), storage.nbytes(), tensor, 0)
    start = cupy.cuda.MemoryPointer(memory, tensor.storage_offset() * dtype.itemsize)
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return cupy.ndarray(tuple(tensor.shape), dtype, memptr=start, strides=strides)


def as_tensor(array: Any) -> torch.Tensor:
    """A CPU tensor over the memory of an array that ``as_cupy`` made, or of a view of one; it keeps the array alive.

    Raises:
        ValueError: a stride is negative, which tensors do not have.
    """
    if any(stride < 0 for stride in array.strides):
        raise ValueError(f"strides {array.strides} are negative: tensors have no such views")
    last = sum((length - 1) * stride for length, stride in zip(array.shape, array.strides)) if array.size else 0
    buffer = (ctypes.c_byte * (last + array.dtype.itemsize if array.size else 0)).from_address(array.data.ptr)
    buffer.array = array  # type: ignore[attr-defined]
    return torch.from_numpy(np.ndarray(array.shape, array.dtype, memoryview(buffer), strides=array.strides))

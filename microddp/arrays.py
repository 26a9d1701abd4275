"""The caller's arrays as torch tensors: torch, NumPy and CuPy, any layout, without a copy where none is needed."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from microddp.device import DeviceRuntime
from microddp.memory import overlaps_itself, same_memory, shares_memory
from microddp_kernels.dtypes import BOOL, COMPLEX, FLOATS, FLOATS8, INTEGERS, UNSIGNED

__all__ = ["DTYPES", "Operand", "check_out", "check_tensor", "check_writable", "copy_of", "new_like", "operand_of"]

DTYPES = tuple(sorted(BOOL | FLOATS | FLOATS8 | INTEGERS | UNSIGNED | COMPLEX, key=str))
"""The element types that can be communicated."""

_DTYPES = frozenset(DTYPES)

_FLIPPED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(slots=True)
class Operand:
    """An array of the caller, and a tensor on the same memory.

    Attributes:
        array: the caller's own object.
        tensor: aliases it. Its dimensions ``flips`` run backwards, as torch knows no negative strides.
        flips: see ``tensor``; empty for all but reversed NumPy and CuPy views.
        read_only: NumPy forbids writing into it.
    """

    array: Any
    tensor: torch.Tensor
    flips: tuple[int, ...] = ()
    read_only: bool = False

    def is_dense(self) -> bool:
        """Whether its memory is its elements in logical order, so that it can be worked on in place."""
        tensor = self.tensor
        return tensor.is_contiguous() and not self.flips and not tensor.is_neg() and not tensor.is_conj()

    def flat(self) -> torch.Tensor:
        """Its memory as a 1-D tensor outside autograd, if it is dense; else a fresh copy in logical order."""
        if self.is_dense():
            return _flattened(_plain(self.tensor))
        return self.copy()

    def copy(self) -> torch.Tensor:
        """A fresh 1-D tensor with its elements in logical order."""
        fresh = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)
        return fresh.copy_(self._logical()).view(-1)

    def room(self) -> torch.Tensor:
        """Like ``flat``, for a result: where that would be a copy, its contents are undefined."""
        if self.is_dense():
            return _flattened(_plain(self.tensor))
        return torch.empty(self.tensor.numel(), dtype=self.tensor.dtype, device=self.tensor.device)

    def write_to(self, flat: torch.Tensor) -> None:
        """Copies its elements into a 1-D tensor, in logical order."""
        flat.view(self.tensor.shape).copy_(self._logical())

    def store(self, flat: torch.Tensor) -> None:
        """Makes ``flat`` its contents (nothing to copy if that is its own memory) and tells autograd."""
        tensor = self.tensor
        if flat.data_ptr() != tensor.data_ptr() or not self.is_dense():
            values = flat.view(tensor.shape)
            _plain(tensor).copy_(_flipped(values, self.flips))
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    def _logical(self) -> torch.Tensor:
        tensor = _plain(self.tensor)
        return _flipped(tensor, self.flips)


def operand_of(array: Any, name: str, runtime: DeviceRuntime | None = None) -> Operand:
    """The caller's array as an operand.

    Args:
        runtime: of the device on which the transport works, if that is ordered by streams.

    Raises:
        TypeError: not a torch tensor, NumPy array or CuPy array, or of an element type that torch does not have.
        ValueError: a NumPy array whose strides are no multiple of its element size.
    """
    if isinstance(array, torch.Tensor):
        return Operand(array, array)
    if isinstance(array, np.ndarray):
        return _from_numpy(array, name)
    if type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "__dlpack__"):
        return _from_cupy(array, name, runtime)
    if isinstance(array, np.generic):
        hint = "a NumPy scalar cannot be written to: pass a 0-dimensional array, np.asarray(value)"
    elif isinstance(array, (bool, int, float, complex)):
        hint = "a Python number cannot be written to: pass torch.tensor(value)"
    elif isinstance(array, (list, tuple)):
        hint = "call it for each tensor, or pass torch.tensor(values)"
    else:
        hint = "convert it first, for example with torch.from_dlpack"
    kinds = "a torch tensor, a NumPy array or a CuPy array"
    raise TypeError(f"{name} must be {kinds}, not {type(array).__qualname__}; {hint}")


def copy_of(array: Any) -> Any:
    """A copy of an array of whatever kind, in memory of its own; anything else as it is."""
    if isinstance(array, torch.Tensor):
        return array.detach().clone()
    copy = getattr(array, "copy", None)
    return copy() if copy is not None else array


def check_tensor(operand: Operand, name: str, device_types: Sequence[str], transport: str) -> None:
    """Refuses what no collective can take.

    Raises:
        TypeError: sparse, quantized, nested or meta tensors, element types not in ``DTYPES``, a device that the
            transport cannot reach, a tensor that needs grad while grad mode is on.
    """
    tensor = operand.tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} needs grad, and communication is not differentiated; pass {name}.detach(), "
            "or call within torch.no_grad()"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} has layout {kind}; only dense (strided) tensors are supported: pass {name}.to_dense()")
    if tensor.dtype not in _DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name} has dtype {dtype}, which is not supported; supported: {supported}")
    if tensor.device.type not in device_types:
        known = " or ".join(device_types)
        raise TypeError(f"{name} is on device {tensor.device}; the {transport} transport takes tensors on {known}")


def check_writable(operand: Operand, name: str) -> None:
    """Refuses what cannot hold a result.

    Raises:
        ValueError: two of its elements share memory, or it is read-only.
    """
    if operand.read_only:
        raise ValueError(f"{name} is a read-only NumPy array; pass a copy, or a writable array as out")
    if not operand.tensor.is_contiguous() and overlaps_itself(operand.tensor):
        shape, stride = tuple(operand.tensor.shape), operand.tensor.stride()
        raise ValueError(
            f"elements of {name} share memory (shape {shape}, stride {stride}), so it cannot hold a result; "
            f"pass {name}.clone(), or a dense tensor as out"
        )


def check_out(out: Operand, source: Operand, shape: Sequence[int]) -> bool:
    """Refuses an ``out`` that does not fit; says whether it is the very view that the source is.

    Raises:
        ValueError: another shape or device, or memory that the source overlaps without being the same view.
        TypeError: another element type.
    """
    tensor, other = out.tensor, source.tensor
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"out has shape {tuple(tensor.shape)}; the result has shape {tuple(shape)}")
    if tensor.dtype != other.dtype:
        raise TypeError(f"out has dtype {tensor.dtype}; the result has dtype {other.dtype}")
    if tensor.device != other.device:
        raise ValueError(f"out is on device {tensor.device}; the result is on device {other.device}")
    if same_memory(tensor, other) and out.flips == source.flips:
        return True
    if shares_memory(tensor, other):
        raise ValueError("out overlaps the input without being the same view of it; pass memory of its own")
    return False


def new_like(source: Operand, shape: Sequence[int], runtime: DeviceRuntime | None = None) -> Operand:
    """A fresh array of the same kind, element type and device as the source's.

    Its memory belongs to the stream on which the caller works on the source: there it can be freed while in use.
    """
    with runtime.on(runtime.caller_stream(source.array)) if runtime else contextlib.nullcontext():
        return _empty_like(source, shape, runtime)


def _empty_like(source: Operand, shape: Sequence[int], runtime: DeviceRuntime | None) -> Operand:
    tensor = torch.empty(tuple(shape), dtype=source.tensor.dtype, device=source.tensor.device)
    if isinstance(source.array, torch.Tensor):
        return Operand(tensor, tensor)
    if isinstance(source.array, np.ndarray):
        return Operand(tensor.numpy(), tensor)
    return Operand(runtime.to_cupy(tensor) if runtime else sys.modules["cupy"].from_dlpack(tensor), tensor)


def _flipped(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these dimensions reversed. torch has no flip of some types, but of others as wide."""
    if not dims:
        return tensor
    carrier = _FLIPPED_AS.get(tensor.dtype)
    return tensor.flip(dims) if carrier is None else tensor.view(carrier).flip(dims).view(tensor.dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor outside autograd and inference mode, which any thread may write."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
            fresh = fresh.conj() if tensor.is_conj() else fresh  # a storage knows nothing of either
            return torch._neg_view(fresh) if tensor.is_neg() else fresh
    return tensor.detach() if tensor.requires_grad else tensor


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as one dimension of stride 1. That of one element (or none) may have any stride,
    with which torch refuses to view it as another dtype."""
    flat = tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def _from_cupy(array: Any, name: str, runtime: DeviceRuntime | None) -> Operand:
    forward, flips = _forward(array)
    try:
        tensor = from_dlpack(forward) if runtime is None else runtime.from_cupy(forward)
    except (TypeError, BufferError, RuntimeError) as error:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"{name}, a CuPy array of {array.dtype}, cannot be taken over ({error}); supported: {supported}"
        ) from error
    return Operand(array, tensor, flips)


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> Operand:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked NumPy array, whose mask would be ignored; pass {name}.filled(value)")
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} has dtype {array.dtype.str}, whose byte order is not this machine's; "
            f"pass {name}.astype({name}.dtype.newbyteorder('='))"
        )
    if any(stride % max(array.itemsize, 1) for stride in array.strides):
        raise ValueError(
            f"{name} has strides {array.strides}, no multiples of its {array.itemsize}-byte elements; "
            f"pass np.ascontiguousarray({name})"
        )
    forward, flips = _forward(array)
    read_only = not array.flags.writeable
    try:
        tensor = torch.from_numpy(_Writable(forward).array() if read_only else forward)
    except TypeError as error:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name} has dtype {array.dtype}, which is not supported; supported: {supported}") from error
    return Operand(array, tensor, flips, read_only)


class _Writable:
    """A read-only NumPy array as a writable one, as torch has no read-only tensors; it is never written."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._kept = array
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}

    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


def _forward(array: Any) -> tuple[Any, tuple[int, ...]]:
    """A view of the same memory without negative strides, and the dimensions that it reverses."""
    if math.prod(array.shape) == 0:
        return array, ()
    flips = tuple(dim for dim, stride in enumerate(array.strides) if stride < 0)
    if not flips:
        return array, ()
    return array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)], flips

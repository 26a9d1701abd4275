"""Conversions between element types, by Triton's rules, on the tensors that store them."""

from __future__ import annotations

from typing import Any, Final

import torch

from microddp_kernels.evaluate.element_types import BF16, FP16, FP64, INT1, SIGN_BITS, STORAGE, canonical
from microddp_kernels.evaluate.errors import NotEvaluable

__all__ = ["bitcast", "convert", "number_as", "tensor_of"]

_MASKS: Final = {"uint16": 2**16 - 1, "uint32": 2**32 - 1, "uint64": -1}
_LARGE: Final = 2**31


def convert(tensor: torch.Tensor, source: Any, target: Any) -> torch.Tensor:
    """``tensor`` of the Triton type ``source`` in the type ``target``: floats are rounded to nearest, ties to even.

    Raises:
        NotEvaluable: the conversion would be to 8 bits, where machines disagree.
    """
    if source is target:
        return tensor
    if target is INT1:
        return tensor.ne(0)
    storage = STORAGE[target.name]
    if target.is_floating():
        return _to_float(tensor, source, target, storage)
    if source.is_floating():
        return _float_to_integer(tensor, target, storage)
    if source.name in SIGN_BITS and storage.itemsize > tensor.element_size():
        return tensor.to(storage).bitwise_and_((1 << source.primitive_bitwidth) - 1)
    return tensor.to(storage)


def _to_float(tensor: torch.Tensor, source: Any, target: Any, storage: torch.dtype) -> torch.Tensor:
    if target.is_fp8():
        raise NotEvaluable(f"a conversion to {target}")
    if target is FP16 or target is BF16:
        return _to_float32(tensor, source).to(storage)
    if source.name == "uint64":
        halved = ((tensor >> 1) & (2**63 - 1)) | (tensor & 1)  # the lowest bit stays, so that rounding sees it
        return torch.where(tensor < 0, halved.to(storage) * 2, tensor.to(storage))
    if source.name in SIGN_BITS:
        return tensor.to(torch.int64).bitwise_and_((1 << source.primitive_bitwidth) - 1).to(storage)
    return tensor.to(storage)


def _to_float32(tensor: torch.Tensor, source: Any) -> torch.Tensor:
    """Rounded to odd, so that what is rounded to 16 bits next is rounded once (Boldo and Melquiond, 2008)."""
    if source is FP64:
        return _to_odd(tensor)
    if source.name in SIGN_BITS:
        tensor = tensor.to(torch.int64) & _MASKS[source.name]
    if not source.is_int() or source.primitive_bitwidth <= 16:
        return tensor.to(torch.float32)
    if source.primitive_bitwidth < 64:
        return _to_odd(tensor.to(torch.float64))
    # float64 has no room for 64 bits; of a large number the last 20 count only by whether they are zero.
    is_large = (tensor < (0 if source.name == "uint64" else -_LARGE)) | (tensor >= _LARGE)
    high = tensor >> 20
    if source.name == "uint64":
        high = high & (2**44 - 1)
    odd = high | (tensor & (2**20 - 1) != 0).to(torch.int64)
    return _to_odd(torch.where(is_large, odd.to(torch.float64) * 2.0**20, tensor.to(torch.float64)))


def _to_odd(tensor: torch.Tensor) -> torch.Tensor:
    """float64 in float32: the neighbour whose last bit is set, if it lies between two."""
    nearest = tensor.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    moves = (back != tensor) & torch.isfinite(nearest) & (bits & 1 == 0)
    outwards = torch.where(tensor.abs() > back.abs(), 1, -1)
    return torch.where(moves, bits + outwards, bits).to(torch.int32).view(torch.float32)


def _float_to_integer(tensor: torch.Tensor, target: Any, storage: torch.dtype) -> torch.Tensor:
    """Towards zero. What the type cannot hold is converted to something unspecified, as on GPUs."""
    if target.name == "uint64":
        wide = tensor.to(torch.float64)
        high = (wide - 2.0**63).to(torch.int64) ^ SIGN_BITS["uint64"]
        return torch.where(wide >= 2.0**63, high, wide.to(torch.int64))
    if target.is_int_unsigned():
        return tensor.to(torch.int64).to(storage)
    return tensor.to(storage)


def bitcast(tensor: torch.Tensor, source: Any, target: Any) -> torch.Tensor:
    """The bits of ``tensor`` as another type of the same size. Raises ValueError if the sizes differ."""
    if source.primitive_bitwidth != target.primitive_bitwidth:
        raise ValueError(
            f"cannot bitcast {source} of {source.primitive_bitwidth} bits to {target} of {target.primitive_bitwidth}"
        )
    return tensor.view(STORAGE[target.name])


def number_as(value: Any, dtype: Any) -> Any:
    """A Python number as torch takes it beside a tensor that stores ``dtype``.

    Raises:
        ValueError: the type cannot hold it.
    """
    if dtype.is_floating():
        value = float(value)
        return torch.tensor(value, dtype=STORAGE[dtype.name]) if dtype is FP16 or dtype is BF16 else value
    if dtype is INT1:
        return bool(value)
    if not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
        raise ValueError(f"the number {value} is out of range for type {dtype}")
    value = int(value)
    sign_bit = SIGN_BITS.get(dtype.name)
    return value + 2 * sign_bit if sign_bit is not None and value >= -sign_bit else value


def tensor_of(value: Any, dtype: Any) -> torch.Tensor:
    """A tensor without dimensions that holds a Python number."""
    dtype = canonical(dtype)
    return torch.as_tensor(number_as(value, dtype), dtype=STORAGE[dtype.name])

"""Triton's element types on torch tensors: how each is stored, and which type two operands are computed in.

uint16, uint32 and uint64 are stored in signed tensors of the same bits, as torch's CPU kernels know no arithmetic on
the unsigned ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic

from microddp_kernels.evaluate.errors import NotEvaluable

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "FP64",
    "INT1",
    "INT32",
    "INT64",
    "SIGN_BITS",
    "STORAGE",
    "canonical",
    "common_of_all",
    "common_type",
    "number_in",
    "triton_type",
    "type_of_number",
]

INT1: Final = tl.int1
INT32: Final = tl.int32
INT64: Final = tl.int64
FP16: Final = tl.float16
BF16: Final = tl.bfloat16
FP32: Final = tl.float32
FP64: Final = tl.float64

_ALL: Final = (
    (INT1, torch.bool),
    (tl.int8, torch.int8),
    (tl.int16, torch.int16),
    (INT32, torch.int32),
    (INT64, torch.int64),
    (tl.uint8, torch.uint8),
    (tl.uint16, torch.int16),
    (tl.uint32, torch.int32),
    (tl.uint64, torch.int64),
    (FP16, torch.float16),
    (BF16, torch.bfloat16),
    (FP32, torch.float32),
    (FP64, torch.float64),
    (tl.float8e4nv, torch.float8_e4m3fn),
    (tl.float8e5, torch.float8_e5m2),
)
STORAGE: Final = {kind.name: dtype for kind, dtype in _ALL}
"""By name of a Triton type: the torch type that stores it."""

SIGN_BITS: Final = {"uint16": -(2**15), "uint32": -(2**31), "uint64": -(2**63)}
"""By name of an unsigned type that is stored as signed: the sign bit, whose flip makes signed order unsigned order."""

_CANONICAL: Final = {kind.name: kind for kind, _ in _ALL}
_OF_TORCH: Final = {dtype: kind for kind, dtype in reversed(_ALL)} | {
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
}
for _signed in (tl.int16, tl.int32, tl.int64):
    _OF_TORCH[STORAGE[_signed.name]] = _signed

_SEMANTIC: Final = TritonSemantic.__new__(TritonSemantic)  # the rules of promotion need no builder of code


def canonical(dtype: Any) -> Any:
    """The one object that stands for a Triton type here, so that types are compared by identity."""
    found = _CANONICAL.get(getattr(dtype, "name", None))
    if found is None:
        raise NotEvaluable(f"type {dtype}")
    return found


def triton_type(dtype: torch.dtype) -> Any:
    """The Triton type of tensors of ``dtype``."""
    return _OF_TORCH[dtype]


@cache
def _common_type(first: str, first_is_number: bool, second: str, second_is_number: bool, divides: bool) -> Any:
    found = _SEMANTIC.computation_type_impl(
        _CANONICAL[first], first_is_number, _CANONICAL[second], second_is_number, divides
    )
    return canonical(found)


def common_type(first: Any, second: Any, divides: bool = False) -> Any:
    """The type in which Triton computes on tensors of the types ``first`` and ``second``."""
    return _common_type(first.name, False, second.name, False, divides)


def type_of_number(value: Any) -> Any:
    """The type that Triton gives to a Python number. Raises TypeError for anything else."""
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"cannot convert {value!r} to a tensor")
    return canonical(_SEMANTIC.to_tensor_type(value))


def common_of_all(tensor_types: list[Any], numbers: list[Any]) -> Any:
    """The type in which Triton computes on three operands: tensors of these types, and Python numbers."""
    found: list[Any] = []
    for is_number, kinds in ((False, tensor_types), (True, [type_of_number(number) for number in numbers])):
        common: Any = kinds[0] if kinds else None
        for kind in kinds[1:]:
            common = _common_type(common.name, is_number, kind.name, is_number, False)
        found.append(common)
    of_tensors, of_numbers = found
    if of_tensors is None or of_numbers is None:
        return of_tensors or of_numbers
    return _common_type(of_tensors.name, False, of_numbers.name, True, False)


def number_in(dtype: Any, value: Any, divides: bool = False) -> Any:
    """The type in which Triton computes on a tensor of ``dtype`` and a Python number."""
    return _common_type(dtype.name, False, type_of_number(value).name, True, divides)

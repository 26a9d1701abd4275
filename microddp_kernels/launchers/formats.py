"""How the Triton kernels are told of element types: by a pointer's type, a format, and a type to compute in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton.language as tl

from microddp_kernels.dtypes import FLOATS8

__all__ = ["ACCUMULATION_TYPES", "Launch", "as_bytes", "carried", "format_of"]

Launch = Callable[[Any, int, tuple[Any, ...], dict[str, Any]], None]
"""``launch(kernel, num_programs, arguments, constants)`` starts one of the kernels."""

ACCUMULATION_TYPES: Final = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.complex64: tl.float32,
    torch.complex128: tl.float64,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
    torch.bool: tl.int32,
}
"""By accumulation type, what the kernels compute in: of complex ones, each part; truth values as int32 0 and 1."""

_PARTS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_NAMES8: Final = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
_CARRIER_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def format_of(dtype: torch.dtype, soft_bfloat16: bool, hardware_float8: bool) -> str:
    """The format (see ``microddp_kernels.convert``) of elements that ``carried`` hands to a kernel."""
    if dtype == torch.bool:
        return "bool"
    if dtype in FLOATS8:
        return f"hardware {_NAMES8[dtype]}" if hardware_float8 else _NAMES8[dtype]
    return "bfloat16" if dtype == torch.bfloat16 and soft_bfloat16 else "native"


def carried(tensor: torch.Tensor, soft_bfloat16: bool) -> torch.Tensor:
    """The memory of ``tensor`` as the kernels take it; complex elements, if 1-D contiguous, as their parts."""
    dtype = tensor.dtype
    if dtype == torch.bool or dtype in FLOATS8:
        return tensor.view(torch.uint8)
    if dtype == torch.bfloat16 and soft_bfloat16:
        return tensor.view(torch.uint16)
    return tensor.view(_PARTS[dtype]) if dtype.is_complex else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` as integers of their size, to move them; of 16 bytes as two, in a last dimension."""
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_CARRIER_OF_SIZE[tensor.element_size()])

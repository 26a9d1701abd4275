"""Which declarations of an operator make no sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from microddp_kernels.dtypes import NARROW_FLOATS, UNSIGNED, dtype_names

__all__ = ["check_accumulate", "check_nan", "check_rest"]


def check_rest(
    name: Any, commutative: Any, associative: Any, finalize: Any, torch_function: Any, torch_finalize: Any
) -> None:
    """Raises TypeError or ValueError for a wrong name, law or torch function."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {name!r}")
    if not name:
        raise ValueError("name must not be empty")
    for law, value in (("commutative", commutative), ("associative", associative)):
        if not isinstance(value, bool):
            raise TypeError(f"{law} must be True or False, not {value!r}")
    for what, function in (("torch_function", torch_function), ("torch_finalize", torch_finalize)):
        if function is not None and not callable(function):
            raise TypeError(f"{what} must be a function on torch tensors, not {function!r}")
    if torch_finalize is not None and finalize is None:
        raise ValueError("torch_finalize is the torch form of finalize, which is not given")


def check_nan(nan: Any, lanes: Sequence[frozenset[torch.dtype]]) -> None:
    """Raises ValueError unless the claim is known and there are floats of which it can be true."""
    if nan not in (None, "propagate", "ignore"):
        raise ValueError(f"nan must be 'propagate', 'ignore' or None, not {nan!r}")
    if nan is not None and not any(dtype.is_floating_point for legal in lanes for dtype in legal):
        raise ValueError(f"nan={nan!r} is claimed, but no lane may be a float")


def check_accumulate(accumulate: Any, lanes: Sequence[frozenset[torch.dtype]]) -> None:
    """Raises TypeError or ValueError unless some lane has a type that ``accumulate`` is wider than, without loss."""
    if accumulate is None:
        return
    if not isinstance(accumulate, torch.dtype):
        raise TypeError(f"accumulate must be an element type, not {accumulate!r}")
    kind = dtype_names([accumulate])
    if accumulate == torch.bool or accumulate.is_complex or accumulate in NARROW_FLOATS:
        raise ValueError(f"nothing is accumulated in {kind}; use a float or integer of 32 bits or more")
    legal = frozenset().union(*lanes)
    same = {dtype for dtype in legal if dtype.is_floating_point == accumulate.is_floating_point and not _is_bool(dtype)}
    usual = {torch.float32 if dtype in NARROW_FLOATS else dtype for dtype in same}
    if not any(accumulate.itemsize > dtype.itemsize for dtype in usual):
        widest = dtype_names(usual) if usual else f"of {dtype_names(legal)}, none of its kind"
        raise ValueError(f"accumulate={kind} is no wider than the types that are used anyway: {widest}")
    signed = {dtype for dtype in usual if dtype.is_signed and dtype.itemsize < accumulate.itemsize}
    if (accumulate in UNSIGNED or accumulate == torch.uint8) and signed:
        raise ValueError(f"accumulate={kind} cannot hold the negative numbers of {dtype_names(signed)}")


def _is_bool(dtype: torch.dtype) -> bool:
    return dtype == torch.bool

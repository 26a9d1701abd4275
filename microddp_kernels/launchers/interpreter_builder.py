"""What Triton's interpreter does otherwise than a GPU, set right: methods of its builder.

It was written for Triton 3.9, whose interpreter truncates what is converted to bfloat16, computes on the bits of
bfloat16 as if they were integers, and takes either of two zeros for a minimum or maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from microddp_kernels.evaluate.convert import convert
from microddp_kernels.evaluate.element_types import STORAGE

__all__ = ["METHODS"]

_BINARY: Final = InterpreterBuilder.binary_op
_UNARY: Final = InterpreterBuilder.unary_op
_FMA: Final = InterpreterBuilder.create_fma
_CAST: Final = InterpreterBuilder.cast_impl

Array = np.ndarray[Any, np.dtype[Any]]


def _ordered(select: Any, of_signs: Any) -> Callable[[Any, Any], Any]:
    """``select`` of NumPy, which may return either of two zeros, as PTX has it: -0.0 is below 0.0.

    As in ``microddp_kernels.evaluate.functions``: both orders, compared as integers.
    """

    def function(first: Any, second: Any) -> Any:
        found = select(first, second)
        bits = np.dtype(f"i{found.dtype.itemsize}")
        return of_signs(found.view(bits), select(second, first).view(bits)).view(found.dtype)

    return function


_MINIMUM: Final = _ordered(np.minimum, np.minimum)
_MAXIMUM: Final = _ordered(np.maximum, np.maximum)
_MINIMUM_BUT_NAN: Final = _ordered(np.fmin, np.minimum)
_MAXIMUM_BUT_NAN: Final = _ordered(np.fmax, np.maximum)


def _clamp(builder: Any, value: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
    skips = propagate_nan == tl.PropagateNan.NONE
    largest, least = (_MAXIMUM_BUT_NAN, _MINIMUM_BUT_NAN) if skips else (_MAXIMUM, _MINIMUM)
    return builder.binary_op(builder.binary_op(value, low, largest), high, least)


def _cast(builder: Any, value: Any, target: Any) -> Any:
    """A conversion; to bfloat16 rounded to nearest, once, and from it by way of float32, which is exact."""
    source, wanted = value.dtype.scalar, target.scalar
    if source == wanted or tl.bfloat16 not in (source, wanted):
        return _CAST(builder, value, target)
    if source == tl.bfloat16:
        wide = TensorHandle(_widened(value.data), tl.float32)
        return wide if wanted == tl.float32 else _CAST(builder, wide, target)
    return TensorHandle(_as_bfloat16(value.data, source), tl.bfloat16)


def _as_bfloat16(values: Array, source: Any) -> Array:
    stored = STORAGE[source.name]
    tensor = torch.from_numpy(np.ascontiguousarray(values)).reshape(-1)
    tensor = tensor.view(stored) if tensor.dtype != stored else tensor
    found: Array = convert(tensor, source, tl.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return found.reshape(np.shape(values))


def _widened(bits: Array) -> Array:
    found: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return found


def _of_bfloat16(call: Callable[..., Any], builder: Any, values: tuple[Any, ...], *more: Any) -> Any:
    """``call`` in float32, rounded, if the values are bfloat16; comparisons stay truth values."""
    if values[-1].dtype.scalar != tl.bfloat16:
        return call(builder, *values, *more)
    wide = [TensorHandle(_widened(each.data), tl.float32) for each in values]
    found = call(builder, *wide, *more)
    if found.data.dtype == np.bool_:
        return TensorHandle(found.data, tl.bfloat16)
    return TensorHandle(_as_bfloat16(found.data, tl.float32), tl.bfloat16)


METHODS: Final[dict[str, Any]] = {
    "binary_op": lambda builder, first, second, op: _of_bfloat16(_BINARY, builder, (first, second), op),
    "cast_impl": _cast,
    "create_clampf": _clamp,
    "create_fma": lambda builder, first, second, third: _of_bfloat16(_FMA, builder, (first, second, third)),
    "create_maximumf": lambda builder, first, second: builder.binary_op(first, second, _MAXIMUM),
    "create_maxnumf": lambda builder, first, second: builder.binary_op(first, second, _MAXIMUM_BUT_NAN),
    "create_minimumf": lambda builder, first, second: builder.binary_op(first, second, _MINIMUM),
    "create_minnumf": lambda builder, first, second: builder.binary_op(first, second, _MINIMUM_BUT_NAN),
    "unary_op": lambda builder, value, op: _of_bfloat16(_UNARY, builder, (value,), op),
}
"""By name, instead of the interpreter's own."""

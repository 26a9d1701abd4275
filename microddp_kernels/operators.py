"""The built-in reduction operators, by name.

Integers wrap around. NaN propagates through ``sum``, ``prod``, ``min`` and ``max``; its sign and payload are not
specified. ``min`` and ``max`` order -0.0 below +0.0 (IEEE 754-2019 minimum and maximum), whatever the order of the
operands. On bool, ``sum``, ``max`` and ``bor`` are the logical or, ``prod``, ``min`` and ``band`` the logical and,
``bxor`` the exclusive or, and only bytes 0 and 1 are stored. ``avg`` is ``sum`` with a division at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microddp_kernels.op_registry import get_op, op_names, register_op
from microddp_kernels.reduce_op import KernelFunction, ReduceOp
from microddp_kernels.scratch import BLOCK_NUMEL, block_scratch

__all__ = ["get_op", "op_names"]

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
_BITWISE = _INTEGERS | {torch.bool}
_ALL = _FLOATS | _BITWISE

_BITS_OF = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def _ordering_zeros(select: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.minimum`` or ``torch.maximum``, with -0.0 below +0.0.

    Which of two zeros torch returns depends on the order of the operands and on the position of the element (vectors
    and their tail differ). Selected in both orders, the results differ in nothing but the signs of zeros (or the
    payload of NaN), and the same selection on them as integers settles it.
    """

    def select_block(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, bits: torch.dtype) -> None:
        forward = select(first, second, out=block_scratch("ordering zeros", first.dtype, first.numel()))
        backward = select(second, first, out=out).view(bits)
        select(forward.view(bits), backward, out=backward)

    def ordered(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        bits = _BITS_OF.get(out.dtype)
        if bits is None:
            return select(first, second, out=out)
        numel = out.numel()
        if numel <= BLOCK_NUMEL:
            select_block(first, second, out, bits)
            return out
        for start in range(0, numel, BLOCK_NUMEL):
            stop = start + BLOCK_NUMEL
            select_block(first[start:stop], second[start:stop], out[start:stop], bits)
        return out

    return ordered


def _op(name: str, combine: str, eager: Any, dtypes: frozenset[torch.dtype], divides: bool = False) -> ReduceOp:
    return ReduceOp(name, KernelFunction("microddp_kernels.kernels", combine), eager, dtypes, divides=divides)


# torch adds, multiplies and selects 16-bit floats in float32, rounding once, and bool logically, so one call each does.
for _each in (
    _op("sum", "add", torch.add, _ALL),
    _op("prod", "multiply", torch.mul, _ALL),
    _op("min", "minimum", _ordering_zeros(torch.minimum), _ALL),
    _op("max", "maximum", _ordering_zeros(torch.maximum), _ALL),
    _op("avg", "add", torch.add, _FLOATS, divides=True),
    _op("band", "bitwise_and", torch.bitwise_and, _BITWISE),
    _op("bor", "bitwise_or", torch.bitwise_or, _BITWISE),
    _op("bxor", "bitwise_xor", torch.bitwise_xor, _BITWISE),
):
    register_op(_each)

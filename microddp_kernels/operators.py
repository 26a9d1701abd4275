"""The built-in reduction operators, by name.

Integers wrap around. NaN propagates through ``sum``, ``prod``, ``min`` and ``max``; its sign and payload are not
specified. ``min`` and ``max`` order -0.0 below +0.0 (IEEE 754-2019 minimum and maximum), whatever the order of the
operands. On bool, ``sum``, ``max`` and ``bor`` are the logical or, ``prod``, ``min`` and ``band`` the logical and,
``bxor`` the exclusive or, and only bytes 0 and 1 are stored. ``avg`` is ``sum`` with a division at the end. A product
of complex numbers is (ar br - ai bi, ar bi + ai br), each operation rounded: C's repair of infinities is not done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from microddp_kernels.dtypes import BITS_OF, BOOL, COMPLEX, FLOATS, FLOATS8, INTEGERS, UNSIGNED
from microddp_kernels.op_registry import get_op, op_names, register_op
from microddp_kernels.reduce_op import KernelFunction, ReduceOp
from microddp_kernels.scratch import BLOCK_NUMEL, block_scratch

__all__ = ["get_op", "op_names"]

_VIEWS: Final = {
    **{dtype: BITS_OF[dtype.itemsize] for dtype in UNSIGNED},
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""Types that torch computes on as others: unsigned integers as signed ones, complex numbers as their parts."""

_Function = Callable[..., torch.Tensor]


def _on_views(function: _Function) -> _Function:
    """``function`` where the bits of the result are the same on the types of ``_VIEWS``."""

    def viewed(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        view = _VIEWS.get(out.dtype)
        if view is None:
            return function(first, second, out=out)
        function(first.view(view), second.view(view), out=out.view(view))
        return out

    return viewed


def _by_blocks(work: Callable[..., None], first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``work(first, second, out)`` on one block after another; ``out`` may be exactly ``first`` or ``second``."""
    numel = out.numel()
    if numel <= BLOCK_NUMEL:
        work(first, second, out)
        return out
    for start in range(0, numel, BLOCK_NUMEL):
        stop = start + BLOCK_NUMEL
        work(first[start:stop], second[start:stop], out[start:stop])
    return out


def _ordered(select: _Function) -> _Function:
    """``torch.minimum`` or ``torch.maximum``, with -0.0 below +0.0, and on unsigned integers."""

    def select_floats(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        # Which of two zeros torch returns depends on the order of the operands and on the position of the element
        # (vectors and their tail differ). Selected in both orders, the results differ in nothing but the signs of zeros
        # (or the payload of NaN), and the same selection on them as integers settles it.
        bits = BITS_OF[out.dtype.itemsize]
        forward = select(first, second, out=block_scratch("ordering zeros", first.dtype, first.numel()))
        backward = select(second, first, out=out).view(bits)
        select(forward.view(bits), backward, out=backward)

    def select_unsigned(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        # With the sign bit flipped, signed integers are ordered as the unsigned ones are.
        bits = BITS_OF[out.dtype.itemsize]
        sign = torch.iinfo(bits).min
        left = torch.bitwise_xor(first.view(bits), sign, out=block_scratch("ordered first", bits, first.numel()))
        right = torch.bitwise_xor(second.view(bits), sign, out=block_scratch("ordered second", bits, first.numel()))
        torch.bitwise_xor(select(left, right, out=left), sign, out=out.view(bits))

    def ordered(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if out.dtype in FLOATS:
            return _by_blocks(select_floats, first, second, out)
        if out.dtype in UNSIGNED:
            return _by_blocks(select_unsigned, first, second, out)
        return select(first, second, out=out)

    return ordered


def _multiply_complex(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    """One block. torch's own product is another one: the scalar code repairs infinities, the vectors do not."""
    first_real, first_imag = first.real, first.imag
    second_real, second_imag = second.real, second.imag
    real, imag, term = (block_scratch(use, first_real.dtype, first.numel()) for use in ("real", "imag", "term"))
    torch.mul(first_real, second_real, out=real).sub_(torch.mul(first_imag, second_imag, out=term))
    torch.mul(first_real, second_imag, out=imag).add_(torch.mul(first_imag, second_real, out=term))
    out.real.copy_(real)
    out.imag.copy_(imag)


def _multiply(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    if out.dtype.is_complex:
        return _by_blocks(_multiply_complex, first, second, out)
    return _multiply_real(first, second, out=out)


_multiply_real = _on_views(torch.mul)


def _op(name: str, combine: str, eager: Any, dtypes: frozenset[torch.dtype], **more: Any) -> ReduceOp:
    return ReduceOp(name, KernelFunction("microddp_kernels.kernels", combine), eager, dtypes, **more)


_ORDERED: Final = FLOATS | FLOATS8 | INTEGERS | UNSIGNED | BOOL
_BITWISE: Final = INTEGERS | UNSIGNED | BOOL
_COMPLEX_PRODUCT: Final = KernelFunction("microddp_kernels.kernels", "multiply_complex")

# torch adds, multiplies and selects 16-bit floats in float32, rounding once, and bool logically, so one call each does.
for _each in (
    _op("sum", "add", _on_views(torch.add), _ORDERED | COMPLEX, nan="propagate"),
    _op("prod", "multiply", _multiply, _ORDERED | COMPLEX, complex_combine=_COMPLEX_PRODUCT, nan="propagate"),
    _op("min", "minimum", _ordered(torch.minimum), _ORDERED, nan="propagate"),
    _op("max", "maximum", _ordered(torch.maximum), _ORDERED, nan="propagate"),
    _op("avg", "add", _on_views(torch.add), FLOATS | FLOATS8 | COMPLEX, divides=True, nan="propagate"),
    _op("band", "bitwise_and", _on_views(torch.bitwise_and), _BITWISE),
    _op("bor", "bitwise_or", _on_views(torch.bitwise_or), _BITWISE),
    _op("bxor", "bitwise_xor", _on_views(torch.bitwise_xor), _BITWISE),
):
    register_op(_each)

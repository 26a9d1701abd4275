"""Arithmetic that torch has no function for, or a wrong one: each function here gives the exactly rounded result."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from microddp_kernels.evaluate.element_types import FP32
from microddp_kernels.evaluate.errors import NotEvaluable

__all__ = ["float_remainder", "fused_multiply_add", "high_product", "square_root"]

_LOW_HALF = 2**32 - 1


def fused_multiply_add(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, dtype: Any) -> torch.Tensor:
    """``first * second + third`` of float32 tensors, rounded once.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums", 2008): truncated, with the last bit set if anything was lost, so that rounding it to the
    29 bits fewer of float32 gives what rounding the exact sum would.

    Raises:
        NotEvaluable: another type.
    """
    if dtype is not FP32:
        raise NotEvaluable(f"fma of {dtype}: torch would round it twice")
    product = first.double() * second.double()
    addend = third.double()
    total = product + addend
    # The error of the sum, exactly (Knuth's two-sum).
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    is_inexact = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    towards_error = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(is_inexact, bits + towards_error, bits).view(torch.float64).float()


def high_product(first: torch.Tensor, second: torch.Tensor, dtype: Any) -> torch.Tensor:
    """The upper half of the product of the bits of two integers, taken as unsigned; of 32 or 64 bits."""
    if dtype.primitive_bitwidth == 32 and dtype.is_int():
        product = (first.long() & _LOW_HALF) * (second.long() & _LOW_HALF)
        return _upper(product).to(first.dtype)
    if dtype.primitive_bitwidth != 64 or not dtype.is_int():
        raise TypeError(f"umulhi takes integers of 32 or 64 bits, not {dtype}")
    first_low, first_high = first & _LOW_HALF, _upper(first)
    second_low, second_high = second & _LOW_HALF, _upper(second)
    middle = first_high * second_low + _upper(first_low * second_low)
    other = first_low * second_high + (middle & _LOW_HALF)
    return first_high * second_high + _upper(middle) + _upper(other)


def _upper(tensor: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of 64, without their sign."""
    return (tensor >> 32) & _LOW_HALF


def square_root(tensor: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root. (torch's may be off by one in the last bit.)"""
    with np.errstate(invalid="ignore"):
        return torch.as_tensor(np.sqrt(tensor.numpy()))


def float_remainder(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The remainder of a quotient towards zero, of floats. (torch's is NaN where the quotient overflows.)"""
    found = torch.fmod(first, second)
    wrong = found.isnan() & first.isfinite() & (second != 0) & ~second.isnan()
    if not bool(wrong.any()):
        return found
    with np.errstate(all="ignore"):
        return torch.where(wrong, torch.as_tensor(np.fmod(first.numpy(), second.numpy())), found)

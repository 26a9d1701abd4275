"""Helpers of the operators of ``user_ops``, from another module."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

OFFSET = 0.25
ONE = tl.constexpr(1)


@triton.jit
def plus_one(value):
    return value + ONE

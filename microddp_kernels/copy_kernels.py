"""The Triton kernels that move elements. ``@triton.jit`` functions only; launchers decide how they run."""

# mypy: ignore-errors
# (Triton's decorator is untyped, and a kernel's parameters are pointers and constants that no annotation describes.)

from __future__ import annotations

import triton
import triton.language as tl

from microddp_kernels.convert import narrow, widen

__all__ = ["copy_kernel"]


@triton.jit
def _converted(value, TYPE: tl.constexpr, ACC: tl.constexpr, FORMATS: tl.constexpr):
    """``value`` itself if ``ACC`` is None; else by way of the type ``ACC``."""
    if ACC is None:
        return value
    else:
        return narrow(widen(value, ACC, FORMATS[1]), TYPE, FORMATS[0])


@triton.jit(do_not_specialize=["numel"])
def copy_kernel(out, source, numel, ACC: tl.constexpr, FORMATS: tl.constexpr, BLOCK: tl.constexpr):
    """``out = source``, both 1-D contiguous; moved as it is if ``ACC`` is None, else converted."""
    TYPE: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= numel:
        tl.store(out + offsets, _converted(tl.load(source + offsets), TYPE, ACC, FORMATS))
    else:
        mask = offsets < numel
        tl.store(out + offsets, _converted(tl.load(source + offsets, mask=mask), TYPE, ACC, FORMATS), mask=mask)

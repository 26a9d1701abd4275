"""Kernels and operators each of which breaks one rule of the compile report on purpose, or only seems to."""

# mypy: disable-error-code="no-untyped-def"
# (Triton compiles these functions: their parameters are pointers and constants that no annotation describes.)

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import triton
import triton.language as tl

from microddp_kernels import ReduceOp

BLOCK = 2048
FLOATS = frozenset({torch.float32, torch.float64})


@triton.jit
def _masked_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    tl.store(out + offsets, tl.load(source + offsets, mask=mask), mask=mask)


@triton.jit
def _contracting_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(0) + 1) * BLOCK <= numel:
        value = tl.load(source + offsets)
        tl.store(out + offsets, value * value + value)


@triton.jit
def _twice_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(0) + 1) * BLOCK <= numel:
        value = tl.load(source + offsets, volatile=True)
        tl.store(out + offsets, value + tl.load(source + offsets, volatile=True))


@triton.jit
def _half_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(0) + 1) * BLOCK <= numel and tl.program_id(0) % 2 == 0:
        tl.store(out + offsets, tl.load(source + offsets))


@triton.jit
def _gathering_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(source + tl.load(source + offsets)))


@triton.jit
def _short_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(0) + 1) * BLOCK <= numel:
        tl.store(out + offsets, tl.load(source + offsets))


@triton.jit
def _crowded_kernel(out, source, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(0) + 1) * BLOCK <= numel:
        tl.store(out + offsets, tl.log(tl.exp(tl.load(source + offsets))))


def _copying(kernel: Any, **options: Any) -> Any:
    def play(launcher: Any, op: Any, dtypes: tuple[torch.dtype, ...], numel: int) -> tuple[torch.Tensor, ...]:
        out, source = torch.empty(numel, dtype=dtypes[0]), torch.empty(numel, dtype=dtypes[0])
        kernel[(triton.cdiv(numel, BLOCK),)](out, source, numel, BLOCK=BLOCK, **options)
        return out, source

    return play


masked_only = _copying(_masked_kernel)
contracting = _copying(_contracting_kernel)
not_contracting = _copying(_contracting_kernel, enable_fp_fusion=False)
reads_twice = _copying(_twice_kernel, enable_fp_fusion=False)
writes_half = _copying(_half_kernel)
short_offsets = _copying(_short_kernel)
gathering = _copying(_gathering_kernel)
crowded = _copying(_crowded_kernel, enable_fp_fusion=False, maxnreg=24)
roomy = _copying(_crowded_kernel, enable_fp_fusion=False)


def silent(launcher: Any, op: Any, dtypes: tuple[torch.dtype, ...], numel: int) -> tuple[torch.Tensor, ...]:
    """Launches nothing."""
    return ()


@triton.jit
def _fused(first, second):
    return tl.fma(first, second, first)


@triton.jit
def _product_and_sum(first, second):
    return first * second + first


@triton.jit
def _float_only(first, second):
    tl.static_assert(first.dtype == tl.float32, "this one takes float32 only")
    return first + second


asks_for_fma = ReduceOp("asks_for_fma", _fused, None, FLOATS)
product_and_sum = ReduceOp("product_and_sum", _product_and_sum, None, FLOATS)
float_only = ReduceOp("float_only", _float_only, None, FLOATS)
not_an_operator = _fused


def died(launcher: Any, op: Any, dtypes: tuple[torch.dtype, ...], numel: int) -> tuple[torch.Tensor, ...]:
    """Ends the process that compiles."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ()

"""An operator of four lanes, operands for it, and running operators of several lanes in guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from microddp_kernels import CombineSpec, Lane, ReduceOp
from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from tests.kernels.oracle import (
    FLOATS,
    FLOATS8,
    Array,
    Guarded,
    bits_of,
    fold,
    same,
    sample,
)

BLOCK = 64
LAUNCHERS: dict[str, Launcher] = {"eager": EagerLauncher(), "interpreter": InterpreterLauncher(block=BLOCK)}
on_each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())

ANY_FLOAT = frozenset((*FLOATS, *FLOATS8))
ANY_INTEGER = frozenset({torch.int32, torch.int64, torch.uint8})
BIAS = tl.constexpr(3)

Lanes = tuple[torch.Tensor, ...]
Bits = tuple[Array, ...]


@triton.jit
def _plus(first: Any, second: Any) -> Any:
    return first + second


@triton.jit
def tally(first: Any, second: Any) -> Any:
    """A sum of floats, a minimum of floats, a logical or, and a sum of integers."""
    total, least, seen, count = first
    other_total, other_least, other_seen, other_count = second
    least = tl.minimum(least, other_least, propagate_nan=tl.PropagateNan.ALL)
    return _plus(total, other_total), least, seen | other_seen, _plus(count, other_count)


@triton.jit
def finish_tally(values: Any, world_size: Any) -> Any:
    total, least, seen, count = values
    return total * world_size, least + BIAS, seen == 0, count - world_size


TALLY = ReduceOp(
    "tally",
    tally,
    None,
    ANY_FLOAT,
    lanes=(
        Lane("total", ANY_FLOAT),
        Lane("least", ANY_FLOAT),
        Lane("seen", frozenset({torch.bool})),
        Lane("count", ANY_INTEGER),
    ),
    finalize=finish_tally,
)


def run(
    launcher: Launcher, op: ReduceOp, operands: Sequence[Lanes], divisor: int | None = None, alias: Any = None
) -> Bits:
    """Combines copies of ``operands`` in poisoned memory; returns the bits of the results.

    ``alias``: the operand in whose memory they are, or one for each lane.
    """
    guarded = [[Guarded.holding(lane) for lane in operand] for operand in operands]
    fresh = [Guarded.make(lane.dtype, lane.numel()) for lane in operands[0]]
    chosen = alias if isinstance(alias, tuple) else (alias,) * op.num_lanes
    outs = [fresh[lane] if which is None else guarded[which][lane] for lane, which in enumerate(chosen)]
    tensors = [tuple(lane.tensor for lane in lanes) for lanes in (outs, *guarded)]
    assert launcher.combine(tensors[0], tensors[1:], CombineSpec(op, divisor=divisor)) is None
    for lanes, operand in zip(guarded, operands, strict=True):
        for each, lane in zip(lanes, operand, strict=True):
            assert any(each is out for out in outs) or np.array_equal(bits_of(each.tensor), bits_of(lane))
    for each in (*fresh, *(lane for lanes in guarded for lane in lanes)):
        each.check()
    return tuple(bits_of(out.tensor) for out in outs)


def check_bits(found: Bits, expected: Bits, dtypes: Sequence[torch.dtype]) -> None:
    for bits, wanted, dtype in zip(found, expected, dtypes, strict=True):
        same(torch.from_numpy(bits.view(np.uint8)).view(dtype), wanted)


def tallies(numel: int, count: int, float_dtype: torch.dtype, integer: torch.dtype) -> list[Lanes]:
    dtypes = (float_dtype, torch.float32, torch.bool, integer)
    return [tuple(sample(dtype, numel, 10 * seed + lane) for lane, dtype in enumerate(dtypes)) for seed in range(count)]


def tally_of(operands: Sequence[Lanes]) -> Bits:
    names = ("sum", "min", "bor", "sum")
    return tuple(
        fold(name, [operand[lane] for operand in operands], operands[0][lane].dtype) for lane, name in enumerate(names)
    )

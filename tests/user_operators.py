"""What a user writes: operators of one to four lanes in a module of their own. All of absmin takes ten lines."""

# mypy: disable-error-code=no-untyped-def

import torch
import triton
import triton.language as tl

import microddp


@microddp.reduce_op(commutative=True, dtypes="floats", nan="propagate")
@triton.jit
def absmin(first, second):
    return tl.minimum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)


@microddp.reduce_op(commutative=True, lanes=("low", "high"))
@triton.jit
def bounds(first, second):
    return tl.minimum(first[0], second[0]), tl.maximum(first[1], second[1])


@triton.jit
def _mean(value, world_size):
    count, total, squares = value
    return count, total / count, squares / count


@microddp.reduce_op(commutative=True, lanes=("count", "sum", "squares"), dtypes={"count": "floats"}, finalize=_mean)
@triton.jit
def moments(first, second):
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


@microddp.reduce_op(lanes=("a", "b", "c", "d"), dtypes=dict.fromkeys("abcd", "floats"))
@triton.jit
def matrix_product(first, second):
    a, b, c, d = first
    e, f, g, h = second
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@microddp.reduce_op(commutative=True, dtypes="floats", accumulate=torch.float64)
@triton.jit
def precise(first, second):
    return first + second

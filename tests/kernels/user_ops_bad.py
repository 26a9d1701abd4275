"""Triton functions that no operator can use."""

# mypy: ignore-errors
# ruff: noqa: F821

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import sum as total

from microddp_kernels import get_op

ALPHA = 3.0
COUNT = 2
TENSOR = torch.ones(2)
ARRAY = np.ones(2)
WORD = "tl"
OPERATOR = get_op("sum")


def plain(a, b):
    return a + b


def plain_helper(a):
    return a


anonymous = lambda a, b: a + b  # noqa: E731


@triton.jit
def one_value(a):
    return a


@triton.jit
def three_values(a, b, c):
    return a + b + c


@triton.jit
def any_values(*values):
    return values[0]


@triton.jit
def keyword_needed(a, b, *, c):
    return a + b + c


@triton.jit
def constant_value(a, b: tl.constexpr):
    return a + b


@triton.jit
def global_float(a, b):
    return a * ALPHA + b


@triton.jit
def global_int(a, b):
    return a * COUNT + b


@triton.jit
def power(a, b):
    return a**2 + b


@triton.jit
def matrix_power(a, b):
    return a @ b


@triton.jit
def element(a, b):
    return a[0] + b


@triton.jit
def floor(a, b):
    return a // b


@triton.jit
def chosen(a, b):
    return tl.where(a > b, a)


@triton.jit
def third(a, b):
    return a[2], b[0]


@triton.jit
def member(a, b):
    return tl.where(a in b, a, b)


@triton.jit
def size(a, b):
    return a + b * a.shape[0]


@triton.jit
def count(a, b):
    return a + b * a.numel


@triton.jit
def global_tensor(a, b):
    return a * TENSOR + b


@triton.jit
def global_array(a, b):
    return a * ARRAY + b


@triton.jit
def calls_plain(a, b):
    return plain_helper(a) + b


@triton.jit
def calls_operator(a, b):
    return OPERATOR(a, b)


@triton.jit
def unknown_name(a, b):
    return a * beta + b


@triton.jit
def unknown_in_triton(a, b):
    return tl.maximun(a, b)


@triton.jit
def calls_later(a, b):
    return defined_later(a, b)


@triton.jit
def python_abs(a, b):
    return abs(a) + b


@triton.jit
def python_max(a, b):
    return max(a, b)


@triton.jit
def sums(a, b):
    return tl.sum(a) + b


@triton.jit
def sums_imported(a, b):
    return total(a) + b


@triton.jit
def sums_by_method(a, b):
    return (a + b).sum() + b


@triton.jit
def transposes(a, b):
    return a.T + b


@triton.jit
def knows_place(a, b):
    return a + tl.program_id(0)


@triton.jit
def loads(a, b):
    return tl.load(a) + b


@triton.jit
def helper_that_sorts(a):
    return tl.sort(a)


@triton.jit
def helped(a, b):
    return helper_that_sorts(a) + b


@triton.jit
def endless(a, b):
    return endless(a, b)


@triton.jit
def returns_nothing(a, b):
    a + b


@triton.jit
def returns_two(a, b):
    return a, b


@triton.jit
def returns_two_or_one(a, b):
    return (a, b) if a.dtype == tl.float32 else a


@triton.jit
def returns_three(a, b):
    return a[0], a[1], b[0]


@triton.jit
def returns_number(a, b):
    return 1


@triton.jit
def adds_first(a, b):
    return a[0] + b[0]


@triton.jit
def takes_three(a, b):
    x, y, z = a
    return x + z, y


@triton.jit
def returns_two_by_helper(a, b):
    return returns_two(a, b)


@triton.jit
def broadcasts(a, b):
    return a[0] + b[1], a[1]


@triton.jit
def has_lambda(a, b):
    scale = lambda x: x * 2  # noqa: E731
    return scale(a) + b


@triton.jit
def has_try(a, b):
    try:
        return a + b
    except ValueError:
        return b


@triton.jit
def asks_if(a, b):
    if a > b:
        return a
    return b


@triton.jit
def asks_which(a, b):
    return a if a > b else b


@triton.jit
def uses_and(a, b):
    return tl.where((a > 0) and (b > 0), a, b)


@triton.jit
def uses_not(a, b):
    return tl.where(not (a > 0), a, b)


@triton.jit
def finalize_of_one(x):
    return x


@triton.jit
def finalize_that_sums(x, world_size):
    return tl.sum(x) / world_size

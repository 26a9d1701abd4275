"""A user's operator on CPU tensors against the same formula written in torch.

``python bench/bench_operators.py [NUMEL]`` combines two tensors of 16 Mi float32 elements (or NUMEL) by each operator,
as a collective does on the CPU, and evaluates the same formula on the whole tensors, with ``out=`` for its last step:
alternating, in one run, medians, and the ratio of the two.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from microddp_kernels import CombineSpec, ReduceOp, get_op, launcher_for
from microddp_kernels.declare import reduce_op

NUMEL = 1 << 24
REPEATS = 9

Tensor = torch.Tensor
Lanes = tuple[torch.Tensor, ...]


@reduce_op(commutative=True, name="bench_absmax")
@triton.jit
def largest(a: Any, b: Any) -> Any:
    """The larger magnitude."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@reduce_op(commutative=True, name="bench_hypot")
@triton.jit
def hypotenuse(a: Any, b: Any) -> Any:
    """The root of the sum of squares."""
    return tl.sqrt(a * a + b * b)


@reduce_op(commutative=True, name="bench_logaddexp")
@triton.jit
def log_add_exp(a: Any, b: Any) -> Any:
    """log(exp(a) + exp(b))."""
    high = tl.maximum(a, b)
    return high + tl.log(tl.exp(a - high) + tl.exp(b - high))


def largest_in_torch(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``largest`` on whole tensors."""
    torch.maximum(a.abs(), b.abs(), out=out)


def hypotenuse_in_torch(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``hypotenuse`` on whole tensors."""
    torch.sqrt(a * a + b * b, out=out)


def log_add_exp_in_torch(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``log_add_exp`` on whole tensors."""
    high = torch.maximum(a, b)
    torch.add(high, torch.log(torch.exp(a - high) + torch.exp(b - high)), out=out)


def argmax_in_torch(a: Lanes, b: Lanes, out: Lanes) -> None:
    """The larger value and its index, ties to the lower one; unlike the operator it does not look for NaN."""
    later = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    torch.where(later, b[0], a[0], out=out[0])
    torch.where(later, b[1], a[1], out=out[1])


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    """Prints the medians of both, taken in turn, and their ratio."""
    ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(REPEATS)]
    mine, other = (statistics.median(each) for each in zip(*times))
    ratio = statistics.median(first / second for first, second in times)
    print(f"{name:18} {mine * 1e3:8.1f} ms {other * 1e3:8.1f} ms {ratio:7.2f}", flush=True)


def compare_one_lane(op: ReduceOp, formula: Callable[[Tensor, Tensor, Tensor], None], numel: int) -> None:
    """Compares one operator with its formula, in speed and in value."""
    a, b, out = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    launcher, spec = launcher_for(a.device), CombineSpec(op)
    compare(op.name, lambda: launcher.combine(out, [a, b], spec), lambda: formula(a, b, out))
    ours = out.clone()
    launcher.combine(ours, [a, b], spec)
    formula(a, b, out)
    torch.testing.assert_close(ours, out)


def compare_argmax(numel: int) -> None:
    """Compares the shipped operator of two lanes with its formula."""
    a, b, out = ((torch.randn(numel), torch.randint(0, numel, (numel,))) for _ in range(3))
    launcher, spec = launcher_for(a[0].device), CombineSpec(get_op("argmax"))
    compare("argmax", lambda: launcher.combine(out, [a, b], spec), lambda: argmax_in_torch(a, b, out))


def main() -> None:
    """Prints one row for each operator."""
    numel = int(sys.argv[1]) if len(sys.argv) > 1 else NUMEL
    torch.manual_seed(0)
    print(f"{numel} elements, {torch.get_num_threads()} threads, medians of {REPEATS}")
    print(f"{'operator':18} {'combine':>11} {'torch':>11} {'ratio':>7}")
    compare_one_lane(largest, largest_in_torch, numel)
    compare_one_lane(hypotenuse, hypotenuse_in_torch, numel)
    compare_one_lane(log_add_exp, log_add_exp_in_torch, numel)
    compare_argmax(numel)


if __name__ == "__main__":
    main()

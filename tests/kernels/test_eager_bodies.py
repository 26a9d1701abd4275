"""Operators given by Triton functions on the eager launcher: evaluated on tensors, or left to the interpreter."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from microddp_kernels import CombineSpec, Lane, ReduceOp, get_op
from microddp_kernels.evaluate import NotEvaluable
from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from microddp_kernels.scratch import BLOCK_NUMEL
from tests.kernels.oracle import COMPLEX, FLOATS, FLOATS8, INTEGERS, bits_of, fold, same, sample

pytestmark = pytest.mark.timeout(60)

EAGER = EagerLauncher()
DTYPES = frozenset({*FLOATS, *FLOATS8, *INTEGERS, *COMPLEX, torch.bool})
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
on_each_launcher = pytest.mark.parametrize("launcher", [EAGER, InterpreterLauncher()], ids=lambda each: each.name)


@triton.jit
def larger(first: Any, second: Any) -> Any:
    """``max``, but for the order of zeros."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add(first: Any, second: Any) -> Any:
    """``sum``."""
    return first + second


@triton.jit
def add_uniform(first: Any, second: Any) -> Any:
    """``sum``, with a function that has no torch form: the interpreter's task."""
    zero = tl.uint_to_uniform_float(tl.zeros_like(first).to(tl.uint32))
    return first + second + zero


@triton.jit
def shifted_mean(total: Any, world_size: Any) -> Any:
    """What is finalized on float32."""
    return tl.div_rn(total, world_size.to(tl.float32)) + 1.0


@triton.jit
def mirrored_mean(total: Any, world_size: Any) -> Any:
    """What is finalized on complex elements: tuples."""
    real, imaginary = total
    return imaginary, real * world_size


@triton.jit
def later(first: Any, second: Any) -> Any:
    """Of a value and a time: the value of the later time."""
    wins = second[1] > first[1]
    return tl.where(wins, second[0], first[0]), tl.maximum(first[1], second[1])


def op_of(combine: Any, name: str = "mine", **more: Any) -> ReduceOp:
    return ReduceOp(name, combine, None, DTYPES, **more)


@pytest.mark.parametrize("dtype", sorted(DTYPES.difference(UNSIGNED), key=str), ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_bodies_are_evaluated(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every type that torch computes on, and never by the interpreter."""
    monkeypatch.setattr(InterpreterLauncher, "combine", None)
    numel = BLOCK_NUMEL * torch.get_num_threads() + 9
    operands = [sample(dtype, numel, seed) for seed in range(count)]
    kept = [bits_of(each) for each in operands]
    out = torch.empty(numel, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    EAGER.combine(out, operands, CombineSpec(op_of(add)))
    expected = fold("sum", operands, dtype)
    same(out, expected)
    assert all(np.array_equal(bits_of(each), before) for each, before in zip(operands, kept, strict=True))
    EAGER.combine(operands[1], operands, CombineSpec(op_of(add)))
    same(operands[1], expected)


@on_each_launcher
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_bodies(launcher: Launcher, dtype: torch.dtype) -> None:
    """Combined and finalized as tuples of parts."""
    op = op_of(add, complex_combine=get_op("prod").complex_combine, finalize=mirrored_mean)
    operands = [sample(dtype, 501, seed) for seed in range(3)]
    out = torch.empty(501, dtype=dtype)
    launcher.combine(out, operands, CombineSpec(op))
    same(out, product := fold("prod", operands, dtype))
    launcher.combine(out, operands, CombineSpec(op, divisor=2))
    float_type = np.float32 if dtype == torch.complex64 else np.float64
    with np.errstate(all="ignore"):
        real, imaginary = product[0::2].view(float_type), product[1::2].view(float_type)
        same(out, np.stack([imaginary, real * float_type(2)], 1).reshape(-1).view(product.dtype))


@on_each_launcher
def test_complex_functions_in_torch_see_complex_elements(launcher: Launcher) -> None:
    """Where the combine function takes complex numbers whole; the interpreter has its Triton twin."""
    op = op_of(add, complex_combine=get_op("prod").complex_combine, torch_function=torch.mul)
    first, second = torch.tensor([1 + 2j] * 50), torch.tensor([3 - 1j] * 50)
    launcher.combine(first, [first, second], CombineSpec(op))
    assert first.tolist() == [5 + 5j] * 50
    launcher.combine(first, [first, second], CombineSpec(op, divisor=5))
    assert first.tolist() == [4 + 2j] * 50


@on_each_launcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bodies_are_finalized(launcher: Launcher, dtype: torch.dtype, count: int) -> None:
    operands = [sample(dtype, 777, seed) for seed in range(count)]
    out = torch.empty(777, dtype=torch.float32)
    launcher.combine(out, operands, CombineSpec(op_of(add, finalize=shifted_mean), divisor=3))
    with np.errstate(all="ignore"):
        mean = fold("avg", operands, torch.float32, divisor=3).view(np.float32)
        same(out, (mean + np.float32(1)).view(np.uint32))
    assert launcher.combine(out, operands, CombineSpec(op_of(add, finalize=shifted_mean))) is None
    same(out, fold("sum", operands, torch.float32))


@on_each_launcher
def test_bodies_of_two_lanes(launcher: Launcher) -> None:
    lanes = (Lane("value", DTYPES), Lane("time", DTYPES))
    values = [torch.randn(400, generator=torch.Generator().manual_seed(seed)).to(torch.float16) for seed in range(4)]
    times = [
        torch.randperm(4 * 400, generator=torch.Generator().manual_seed(9)).view(4, 400)[seed] for seed in range(4)
    ]
    operands = [*zip(values, times, strict=True)]
    latest = np.argmax(torch.stack(times).numpy(), axis=0)
    expected = torch.stack(values).numpy()[latest, np.arange(400)]
    launcher.combine(operands[1], operands, CombineSpec(op_of(later, lanes=lanes)))
    assert np.array_equal(operands[1][0].numpy(), expected)
    assert np.array_equal(operands[1][1].numpy(), torch.stack(times).numpy().max(axis=0))


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_what_torch_cannot_compute_is_interpreted(dtype: torch.dtype) -> None:
    """With one warning for an operator; a torch_function would not help."""
    op = op_of(larger, torch_function=torch.maximum)
    operands = [sample(dtype, 100, seed) for seed in range(3)]
    out = torch.empty(100, dtype=dtype)
    reason = f"operator 'mine' runs in the Triton interpreter .*: torch computes on no {str(dtype)[6:]} there"
    with pytest.warns(RuntimeWarning, match=reason):
        EAGER.combine(out, operands, CombineSpec(op))
    same(out, fold("max", operands, dtype))
    EAGER.combine(operands[0], operands[:2], CombineSpec(op))  # a second warning would be an error
    EAGER.combine(out, operands[1:2], CombineSpec(op))
    assert np.array_equal(bits_of(out), bits_of(operands[1]))
    signed = torch.tensor([1.0, -2.0])
    EAGER.combine(signed, [signed, -signed], CombineSpec(op))
    assert signed.tolist() == [1.0, 2.0]


def test_what_has_no_torch_form_is_interpreted() -> None:
    """From then on, for every type, with one warning in all, whichever thread comes first."""
    op, barrier = op_of(add_uniform, "uniform"), threading.Barrier(4)
    operands = [torch.randn(300, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = fold("sum", operands, torch.float32)

    def work(_: int) -> None:
        out = torch.empty(300)
        barrier.wait(timeout=30)
        EAGER.combine(out, operands, CombineSpec(op))
        same(out, expected)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        narrow = [each.to(torch.bfloat16) for each in operands]
        out = torch.empty(300, dtype=torch.bfloat16)
        EAGER.combine(out, narrow, CombineSpec(op))
    same(out, fold("sum", narrow, torch.bfloat16))
    texts = [str(each.message) for each in caught]
    assert len(texts) == 1 and "operator 'uniform'" in texts[0] and "uint_to_uniform_float" in texts[0]


class Unwilling:
    """An evaluated operator that cannot go on after some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def combine(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if not self.calls:
            raise NotEvaluable("tired")
        self.calls -= 1
        return first + second


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("alias", [None, 0, 1])
def test_the_interpreter_goes_on_where_evaluation_ends(
    monkeypatch: pytest.MonkeyPatch, calls: int, dtype: torch.dtype, alias: int | None
) -> None:
    """After some blocks are done, of which ``out`` may be an operand, and in the middle of one."""
    monkeypatch.setattr("microddp_kernels.launchers.eager_steps.evaluated", lambda op: Unwilling(calls))
    numel = BLOCK_NUMEL * torch.get_num_threads() * 3 // (4 if dtype == torch.complex64 else 2)
    operands = [sample(dtype, numel, seed) for seed in range(3)]
    expected, op = fold("sum", operands, dtype), op_of(add)
    out = torch.empty(numel, dtype=dtype) if alias is None else operands[alias]
    with pytest.warns(RuntimeWarning, match="operator 'mine' runs in the Triton interpreter on CPU tensors.*: tired"):
        EAGER.combine(out, operands, CombineSpec(op))
    same(out, expected)


def test_rehearsals_tell_what_cannot_run() -> None:
    EAGER.rehearse(op_of(add), (torch.bfloat16,), torch.device("cpu"))
    text = r"operator 'mine' cannot be run on float32 by the eager launcher: TypeError: .* must return 1 tensor"
    with pytest.raises(TypeError, match=text):
        EAGER.rehearse(op_of(None, torch_function=print), (torch.float32,), torch.device("cpu"))

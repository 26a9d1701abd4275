"""Launchers: choice, threads, memory, what works without Triton, and operators written by users."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from microddp_kernels import CombineSpec, ReduceOp, get_op, launcher_for
from microddp_kernels.launchers.compiled import CompiledLauncher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from microddp_kernels.scratch import BLOCK_NUMEL, block_scratch
from tests.kernels.oracle import bits_of, fold, same, sample

pytestmark = pytest.mark.timeout(90)

CPU = torch.device("cpu")


@triton.jit
def _magnitude(value: Any) -> Any:
    return tl.abs(value)


@triton.jit
def absmax(first: Any, second: Any) -> Any:
    """Calls a jitted helper."""
    return tl.maximum(_magnitude(first), _magnitude(second), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gated_difference(first: Any, second: Any) -> Any:
    """Calls a function of Triton's own library that is itself jitted."""
    return (first - second) * tl.sigmoid(tl.zeros_like(first))


def run_python(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_the_device_chooses_the_launcher() -> None:
    assert launcher_for(CPU).name == "eager"
    assert launcher_for(CPU) is launcher_for(CPU, "eager")
    assert launcher_for(CPU, "interpreter").name == "interpreter"
    assert launcher_for(torch.device("cuda", 1)).name == "compiled"
    with pytest.raises(ValueError, match="no launcher 'compiled' works on cpu; known there: eager, interpreter"):
        launcher_for(CPU, "compiled")
    with pytest.raises(ValueError, match="no launcher works on meta; there are launchers for cpu and cuda"):
        launcher_for(torch.device("meta"))
    with pytest.raises(ValueError, match="block must be a power of two, got 100"):
        InterpreterLauncher(block=100)


def test_the_compiled_launcher_refuses_cpu_tensors() -> None:
    tensor = torch.zeros(4)
    with pytest.raises(ValueError, match="the compiled launcher works on tensors of one cuda device, got cpu"):
        CompiledLauncher().combine(tensor, [tensor, tensor], CombineSpec(get_op("sum")))
    with pytest.raises(ValueError, match="the compiled launcher works on tensors of one cuda device, got cpu"):
        CompiledLauncher().copy(tensor, tensor)


@pytest.mark.parametrize("name", ["eager", "interpreter"])
def test_several_threads_at_once(name: str) -> None:
    """Blockwise work of four threads, each with its own operands, started together."""
    launcher, num_threads, rounds, numel = launcher_for(CPU, name), 4, 5, 40_000
    barrier = threading.Barrier(num_threads)

    def work(thread: int) -> None:
        operands = [sample(torch.bfloat16, numel, 10 * thread + index) for index in range(3)]
        smallest = fold("min", operands, torch.bfloat16)
        mean = fold("avg", operands, torch.float32, weights=(1, 2, 3))
        out, wide = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)
        barrier.wait(timeout=30)
        for _ in range(rounds):
            launcher.combine(out, operands, CombineSpec(get_op("min")))
            launcher.combine(wide, operands, CombineSpec(get_op("avg"), weights=(1, 2, 3)))
            same(out, smallest)
            same(wide, mean)

    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(work, thread) for thread in range(num_threads)]:
            future.result()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory in units of Linux")
def test_eager_folds_take_little_memory() -> None:
    """Folds of every kind of 48 MiB tensors raise the peak by less than 4 MiB."""
    code = """
import resource, torch
from microddp_kernels import CombineSpec, ReduceOp, get_op, launcher_for
torch.set_num_threads(1)
numel = 12 << 20
narrow = [torch.ones(numel, dtype=torch.bfloat16) for _ in range(3)]
wide, out = torch.full((numel,), 1e9), torch.ones(numel)
bytes8 = torch.ones(numel).to(torch.float8_e4m3fn)
launcher = launcher_for(torch.device("cpu"))
largest = ReduceOp("largest", None, None, frozenset({torch.float32}), torch_function=torch.maximum)
def run(end):
    launcher.copy(bytes8[:end], wide[:end])
    pair = [each[:end].view(torch.complex64) for each in (wide, out)]
    launcher.combine(pair[0], pair, CombineSpec(get_op("prod")))
    pair = [each[:end].view(torch.uint32) for each in (wide, out)]
    launcher.combine(pair[0], pair, CombineSpec(get_op("max")))
    for operands, how in (
        ([wide, out], CombineSpec(largest)),
        ([wide, out, wide], CombineSpec(largest)),
        ([wide, *narrow], CombineSpec(get_op("sum"))),
        (narrow, CombineSpec(get_op("avg"), divisor=3)),
        (narrow, CombineSpec(get_op("avg"), weights=(1, 2, 3))),
        ([wide, out], CombineSpec(get_op("max"))),
    ):
        launcher.combine(out[:end], [each[:end] for each in operands], how)
run(2)  # what a first call costs, whatever the size
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(numel)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_python(code)) < 4 * 1024


def test_small_buffers_are_kept_and_large_ones_are_not() -> None:
    """A thread has one buffer for each use and type, which grows; nobody else's is touched."""
    use = "a test's"
    small = block_scratch(use, torch.int16, 5)
    assert block_scratch(use, torch.int16, BLOCK_NUMEL).data_ptr() == small.data_ptr()
    assert block_scratch(use, torch.int32, 5).data_ptr() != small.data_ptr()
    assert block_scratch("another's", torch.int16, 5).data_ptr() != small.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(block_scratch, use, torch.int16, 5).result().data_ptr() != small.data_ptr()
    grown = block_scratch(use, torch.int16, 2 * BLOCK_NUMEL)
    huge = block_scratch(use, torch.int16, 100 * BLOCK_NUMEL)
    assert (small.numel(), grown.numel(), huge.numel()) == (5, 2 * BLOCK_NUMEL, 100 * BLOCK_NUMEL)
    assert block_scratch(use, torch.int16, BLOCK_NUMEL).data_ptr() == grown.data_ptr()


def test_importing_does_not_import_triton_and_the_cpu_needs_none() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import microddp_kernels as kernels
assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "triton"}
for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None
x = torch.ones(3)
kernels.launcher_for(x.device).combine(x, [x, x, x], kernels.CombineSpec(kernels.get_op("sum")))
assert x.tolist() == [3.0] * 3
try:
    kernels.launcher_for(x.device, "interpreter")
except ImportError as error:
    print(error)
"""
    assert run_python(code) == "the interpreter launcher needs Triton, which is not installed"


INTERPRETED = """
import torch
from microddp_kernels import CombineSpec, get_op, launcher_for
from tests.kernels.oracle import fold, same, sample
from tests.kernels.test_launchers import absmax
launcher = launcher_for(torch.device("cpu"), "interpreter")
for name, dtype in (("sum", torch.bfloat16), ("max", torch.float32), ("prod", torch.bool)):
    operands = [sample(dtype, 300, seed) for seed in range(3)]
    out = torch.empty(300, dtype=dtype)
    for count in (2, 3):
        launcher.combine(out, operands[:count], CombineSpec(get_op(name)))
        same(out, fold(name, operands[:count], dtype))
print(type(absmax).__name__)
"""


@pytest.mark.parametrize(("variable", "kind"), [("0", "JITFunction"), ("1", "InterpretedFunction")])
def test_the_interpreter_works_however_the_kernels_were_defined(variable: str, kind: str) -> None:
    assert run_python(INTERPRETED, TRITON_INTERPRET=variable) == kind


def user_op(name: str, combine: Any, eager: Any) -> ReduceOp:
    return ReduceOp(name, combine, eager, frozenset({torch.float32, torch.bfloat16}))


def eager_absmax(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.maximum(first.abs(), second.abs(), out=out)


def eager_gated_difference(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(first.float() - second.float(), 0.5, out=out)


@pytest.mark.parametrize(
    "op", [user_op("absmax", absmax, eager_absmax), user_op("gated", gated_difference, eager_gated_difference)]
)
def test_operators_of_users_on_the_interpreter(op: ReduceOp) -> None:
    operands = [torch.randn(300, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected, out = torch.empty(300), torch.empty(300)
    for count in (2, 4):
        launcher_for(CPU).combine(expected, operands[:count], CombineSpec(op))
        launcher_for(CPU, "interpreter").combine(out, operands[:count], CombineSpec(op))
        same(out, bits_of(expected))


def test_the_interpreter_leaves_triton_as_it_was() -> None:
    """Also after an error inside a kernel."""

    @triton.jit
    def wrong(first: Any, second: Any) -> Any:
        return tl.zeros_like(first) + undefined_name  # type: ignore[name-defined]  # noqa: F821

    patched = (tl, tl.core, tl.math, tl.tensor, tl.dtype, triton.JITFunction)
    names = [(each, name) for each in patched for name in dir(each)]

    def state() -> list[Any]:
        return [getattr(each, name, None) for each, name in names]

    out, before = torch.ones(4), state()
    op = user_op("gated", gated_difference, eager_gated_difference)
    launcher_for(CPU, "interpreter").combine(out, [out, out], CombineSpec(op))
    assert all(now is then or now == then for now, then in zip(state(), before, strict=True))
    with pytest.raises(Exception, match="undefined_name"):
        launcher_for(CPU, "interpreter").combine(out, [out, out], CombineSpec(user_op("wrong", wrong, None)))
    assert all(now is then or now == then for now, then in zip(state(), before, strict=True))
    assert "interpreter_semantic" not in globals()

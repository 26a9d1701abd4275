"""Conversions to 16-bit floats round once, and 16-bit arithmetic is that of 16-bit floats, on both CPU launchers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from microddp_kernels import CombineSpec
from microddp_kernels.launchers import EagerLauncher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from tests.kernels.evaluate_tools import module_of, op_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("error")]

LAUNCHERS = {"eager": EagerLauncher(), "interpreter": InterpreterLauncher()}
BITS = {torch.bfloat16: 8, torch.float16: 11}
TL = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """The float of 8 or 11 bits that is nearest, ties to even; of normal size."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - BITS[dtype] + 1)
    rounded = float(round(size / unit) * unit)  # round() takes the even one of two
    return -rounded if exact < 0 else rounded


def near_midpoints(bits: int, kept: int, seed: int) -> list[int]:
    """Integers around the middle between two floats of ``kept`` bits, as far as ``bits`` go."""
    random = np.random.default_rng(seed)
    found = []
    for size in random.integers(1, bits + 1, 400).tolist():
        top = 1 << (size - 1)
        step = 1 << max(size - kept - 1, 0)
        found += [top + step * int(random.integers(0, 4)) + off for off in (-1, 0, 1)]
    return [each for each in found if 0 <= each < 1 << bits]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = [f"a.to({name}).to(tl.float32)" for name in TL.values()]
    texts += [f"(a.to({name}) + b.to({name})).to(tl.float32)" for name in TL.values()]
    texts += [f"tl.maximum(-a.to({name}), b.to({name})).to(tl.float32)" for name in TL.values()]
    texts += [f"tl.where(a.to({name}) < b.to({name}), 1.0, 0.0)" for name in TL.values()]
    texts += ["tl.where(b == 0, a, a % b)", "libdevice.tgamma(a) + b"]
    return module_of(tmp_path_factory.mktemp("conversions"), texts)


def combined(launcher: str, function: Any, first: torch.Tensor, second: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    found = torch.empty(first.shape, dtype=out)
    LAUNCHERS[launcher].combine(found, [first, second], CombineSpec(op_of(function)))
    return found


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("source", [torch.float64, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rounded_once(module: Any, launcher: str, source: torch.dtype, dtype: torch.dtype) -> None:
    top = 15 if dtype == torch.float16 else 62 if source != torch.int32 else 30
    integers = near_midpoints(top, BITS[dtype], seed=1)
    numbers = [Fraction(each * sign) for each in integers for sign in (1, -1)]
    if source == torch.float64:
        numbers = [Fraction(float(each)) * (1 + Fraction(sign, 2**45)) for each in numbers for sign in (-1, 0, 1)]
        numbers = [Fraction(float(each)) for each in numbers]
    values = torch.tensor([float(each) if source == torch.float64 else int(each) for each in numbers], dtype=source)
    function = getattr(module, f"f{list(BITS).index(dtype)}")
    found = combined(launcher, function, values, values, source)
    expected = torch.tensor([nearest(each, dtype) for each in numbers], dtype=torch.float64).to(source)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 8, 301])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_arithmetic_of_16_bits(module: Any, launcher: str, numel: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(numel)
    first, second = (torch.from_numpy(random.standard_normal(numel)).to(dtype).float() for _ in range(2))
    first[0], second[-1] = -0.0, 0.0
    at = list(BITS).index(dtype)
    total = combined(launcher, getattr(module, f"f{2 + at}"), first, second, torch.float32)
    assert total.tolist() == [
        nearest(Fraction(a) + Fraction(b), dtype) for a, b in zip(first.tolist(), second.tolist())
    ]
    largest = combined(launcher, getattr(module, f"f{4 + at}"), first, second, torch.float32)
    assert largest.tolist() == torch.maximum(-first, second).tolist()
    less = combined(launcher, getattr(module, f"f{6 + at}"), first, second, torch.float32)
    assert less.tolist() == (first < second).float().tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8], ids=str)
def test_a_quotient_by_zero_that_is_not_taken(module: Any, dtype: torch.dtype) -> None:
    """On the evaluator, without a warning that it runs elsewhere."""
    first, second = torch.tensor([7, 9, 100, 5]).to(dtype), torch.tensor([0, 4, 7, 0]).to(dtype)
    assert combined("eager", module.f8, first, second, dtype).tolist() == [7, 1, 2, 5]


def test_a_function_of_libdevice_without_a_form_is_refused(module: Any) -> None:
    """By a rehearsal too, before anything is sent; the interpreter knows none of them."""
    op, values = op_of(module.f9), torch.ones(3)
    text = "cannot be combined on CPU tensors: libdevice.tgamma has no form there; give a torch_function"
    with pytest.raises(TypeError, match=text):
        LAUNCHERS["eager"].rehearse(op, (torch.float32,), values.device)
    with pytest.raises(TypeError, match=text):
        LAUNCHERS["eager"].combine(values, [values, values], CombineSpec(op))

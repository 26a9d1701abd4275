"""float8: every pair of values, and every conversion, against the definition of the formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from microddp_kernels import CombineSpec, get_op
from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from microddp_kernels.scratch import BLOCK_NUMEL
from tests.kernels.oracle import FLOATS8, bits_of, encode, fold, same, sample, values_of

pytestmark = pytest.mark.timeout(60)

on_each_launcher = pytest.mark.parametrize(
    "launcher", [EagerLauncher(), InterpreterLauncher()], ids=lambda each: each.name
)
on_each_format = pytest.mark.parametrize("dtype", FLOATS8)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def around_every_value(dtype: torch.dtype) -> torch.Tensor:
    """float32: all values, the middles between neighbours, what is next to them, and far beyond the largest."""
    values = np.unique(values_of(every_value(dtype)))
    values = values[np.isfinite(values)].astype(np.float64)
    step = values[-1] - values[-2]
    beyond = np.array([values[-1] + step / 2, values[-1] + step, 2 * values[-1], 1e30, np.inf])
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2, beyond, -beyond, [np.nan, 1e-30, -1e-45]])
    singles = exact.astype(np.float32)
    up, down = (np.nextafter(singles, np.float32(limit)) for limit in (np.inf, -np.inf))
    return torch.from_numpy(np.concatenate([singles, up, down]))


@on_each_launcher
@on_each_format
@pytest.mark.parametrize("name", ["sum", "prod", "min", "max"])
def test_every_pair(launcher: Launcher, dtype: torch.dtype, name: str) -> None:
    first, second = every_value(dtype).view(torch.uint8).repeat_interleave(256), every_value(dtype).view(torch.uint8)
    operands = [first.view(dtype), second.repeat(256).view(dtype)]
    out = torch.empty(65536, dtype=torch.uint8).view(dtype)
    launcher.combine(out, operands, CombineSpec(get_op(name)))
    same(out, fold(name, operands, dtype))


@on_each_launcher
@on_each_format
def test_what_is_too_large_overflows(launcher: Launcher, dtype: torch.dtype) -> None:
    """To NaN in e4m3fn, which has no infinity; to infinity in e5m2. Never to the largest value."""
    largest = torch.finfo(dtype).max
    operands = [torch.full((40,), largest).to(dtype)] * 2
    out = torch.empty(40, dtype=dtype)
    launcher.combine(out, operands, CombineSpec(get_op("sum")))
    assert bits_of(out).tolist() == [0x7F if dtype == torch.float8_e4m3fn else 0x7C] * 40
    launcher.combine(out, [-1 * each.float() for each in operands], CombineSpec(get_op("sum")))
    assert bits_of(out.view(torch.uint8) & 0x7F).tolist() == [0x7F if dtype == torch.float8_e4m3fn else 0x7C] * 40
    launcher.combine(out, operands * 4, CombineSpec(get_op("avg"), divisor=8))
    assert out.float().tolist() == [largest] * 40


@on_each_launcher
@on_each_format
def test_rounding_from_float32(launcher: Launcher, dtype: torch.dtype) -> None:
    """By a copy and by a combine of one operand; at every position of a vector and its tail."""
    source = torch.cat([around_every_value(dtype), sample(torch.float32, 20_000, 1)])
    expected = encode(values_of(source), dtype)
    out = torch.empty(source.shape, dtype=dtype)
    for start in range(3):
        launcher.copy(out[start:], source[start:])
        same(out[start:], expected[start:])
    launcher.combine(out, [source], CombineSpec(get_op("max")))
    same(out, expected)


@on_each_launcher
@on_each_format
@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16])
def test_every_16_bit_value(launcher: Launcher, dtype: torch.dtype, other: torch.dtype) -> None:
    source = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(other)
    out = torch.empty(source.shape, dtype=dtype)
    launcher.copy(out, source)
    same(out, encode(values_of(source), dtype))


@on_each_launcher
@on_each_format
@pytest.mark.parametrize("other", [*FLOATS8, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_value_in_other_types(launcher: Launcher, dtype: torch.dtype, other: torch.dtype) -> None:
    source, out = every_value(dtype), torch.empty(256, dtype=other)
    launcher.copy(out, source)
    if dtype == other:
        assert np.array_equal(bits_of(out), bits_of(source))
    else:
        same(out, encode(values_of(source), other))


@on_each_launcher
@on_each_format
def test_copies_of_any_strides_convert(launcher: Launcher, dtype: torch.dtype) -> None:
    """Larger than a block, transposed on one side; overflow is found in each part."""
    source = torch.ones(300, 2 * BLOCK_NUMEL // 300 + 1)
    source[::7, ::11], source[1::7, 3::11] = 1e9, -float("inf")
    out = torch.empty(source.t().shape, dtype=dtype).t()
    launcher.copy(out, source)
    same(out.contiguous().view(-1), encode(values_of(source.view(-1)), dtype))
    launcher.copy(out[:0], source[:0])


@on_each_format
@pytest.mark.parametrize("numel", [BLOCK_NUMEL + 3, 2 * BLOCK_NUMEL + 1])
def test_blocks_of_the_eager_launcher(dtype: torch.dtype, numel: int) -> None:
    operands = [sample(dtype, numel, seed) for seed in range(3)]
    for name, divisor in (("sum", None), ("avg", 3)):
        out = torch.empty(numel, dtype=torch.uint8).view(dtype)
        EagerLauncher().combine(out, operands, CombineSpec(get_op(name), divisor=divisor))
        same(out, fold(name, operands, dtype, divisor=divisor))

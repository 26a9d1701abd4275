"""Operators of several lanes, wide lanes, finalize and scale, on the launchers that run here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton

from microddp_kernels import CombineSpec, Lane, ReduceOp, get_op
from microddp_kernels.launchers import Launcher
from tests.kernels.lanes_tools import (
    ANY_FLOAT,
    BLOCK,
    LAUNCHERS,
    TALLY,
    check_bits,
    on_each_launcher,
    run,
    tallies,
    tally,
    tally_of,
)
from tests.kernels.oracle import (
    COMPLEX,
    FLOATS,
    FLOATS8,
    Guarded,
    encode,
    fold,
    same,
    sample,
    values_of,
)

pytestmark = pytest.mark.timeout(60)


@on_each_launcher
@pytest.mark.parametrize(
    ("dtype", "integer"),
    [
        (torch.float32, torch.int64),
        (torch.bfloat16, torch.int32),
        (torch.float8_e4m3fn, torch.uint8),
        (torch.float64, torch.int32),
        (torch.float16, torch.uint8),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_lanes_of_different_types(launcher: Launcher, dtype: torch.dtype, integer: torch.dtype, count: int) -> None:
    """Each lane in its own accumulation type, as if it were folded alone; into fresh memory and over operands."""
    operands = tallies(BLOCK + 5, count, dtype, integer)
    expected = tally_of(operands)
    for alias in (None, 0, count - 1, tuple(lane % count for lane in range(4))):
        check_bits(run(launcher, TALLY, operands, alias=alias), expected, [lane.dtype for lane in operands[0]])


@on_each_launcher
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_sizes_around_a_block(launcher: Launcher, numel: int) -> None:
    for count in (2, 3):
        operands = tallies(numel, count, torch.bfloat16, torch.int64)
        check_bits(run(launcher, TALLY, operands), tally_of(operands), [lane.dtype for lane in operands[0]])


@on_each_launcher
@pytest.mark.parametrize("count", [1, 2, 3])
def test_lanes_are_finalized_in_the_accumulation_type(launcher: Launcher, count: int) -> None:
    """Once, before anything is rounded."""
    operands = tallies(BLOCK + 5, count, torch.bfloat16, torch.int32)
    world_size, lanes = 7, list(zip(*operands, strict=True))
    with np.errstate(all="ignore"):
        total, least = (
            values_of(torch.from_numpy(fold(name, lane, torch.float32).view(np.float32)))
            for name, lane in (("sum", lanes[0]), ("min", lanes[1]))
        )
        seen, counted = fold("bor", lanes[2], torch.bool), fold("sum", lanes[3], torch.int32)
        expected = (
            encode(total * np.float32(world_size), torch.bfloat16),
            encode(least + np.float32(3), torch.float32),
            encode(seen == 0, torch.bool),
            encode(counted.astype(np.int64).astype(object) - world_size, torch.int32),
        )
    for alias in (None, count - 1):
        found = run(launcher, TALLY, operands, divisor=world_size, alias=alias)
        check_bits(found, expected, [lane.dtype for lane in operands[0]])


@triton.jit
def product_2x2(first: Any, second: Any) -> Any:
    """Row by column, of matrices whose four elements are the lanes: not commutative."""
    a, b, c, d = first
    e, f, g, h = second
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@on_each_launcher
def test_an_operator_that_does_not_commute(launcher: Launcher) -> None:
    """The lanes depend on each other and on the order: exact products in Python integers, with wrap-around."""
    numbers = frozenset({torch.int64})
    lanes = tuple(Lane(name, numbers) for name in ("a", "b", "c", "d"))
    op = ReduceOp("product", product_2x2, None, numbers, lanes=lanes, commutative=False)
    operands = [tuple(sample(torch.int64, 37, 4 * seed + lane) for lane in range(4)) for seed in range(4)]
    matrices = [np.array([values_of(lane) for lane in operand]).reshape(2, 2, -1) for operand in operands]
    for count in (2, 3, 4):
        total = matrices[0]
        for matrix in matrices[1:count]:
            total = np.einsum("ijn,jkn->ikn", total, matrix)
        expected = tuple(encode(each, torch.int64) for each in total.reshape(4, -1))
        for alias in (None, 0, count - 1):
            check_bits(run(launcher, op, operands[:count], alias=alias), expected, [torch.int64] * 4)


@triton.jit
def finish_single(value: Any, world_size: Any) -> Any:
    return value * value - world_size


@on_each_launcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_single_lane_is_finalized(launcher: Launcher, dtype: torch.dtype, count: int) -> None:
    op = replace(get_op("sum"), name="finalized", finalize=finish_single)
    operands, out = [sample(dtype, BLOCK + 3, seed) for seed in range(count)], torch.empty(BLOCK + 3, dtype=dtype)
    launcher.combine(out, operands, CombineSpec(op, divisor=5))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = values_of(torch.from_numpy(fold("sum", operands, wide).view(np.uint8)).view(wide))
    with np.errstate(all="ignore"):
        same(out, encode(total * total - (total.dtype.type(5) if dtype.is_floating_point else 5), dtype))


@on_each_launcher
def test_a_finalized_truth_value_stays_one(launcher: Launcher) -> None:
    op = replace(get_op("sum"), name="finalized", finalize=finish_single)
    operands = [torch.tensor([True, False] * 9)] * 3
    for world_size, expected in ((3, [True, True]), (1, [False, True])):
        out = torch.empty(18, dtype=torch.bool)
        launcher.combine(out, operands, CombineSpec(op, divisor=world_size))
        assert out.view(torch.uint8).tolist() == [int(each) for each in expected] * 9


@on_each_launcher
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS8, *COMPLEX])
@pytest.mark.parametrize("scale", [0.1, 1.0, -3.0, 0.0, -0.0, 1e300, -1e-320, float("inf")])
def test_one_operand_is_scaled(launcher: Launcher, dtype: torch.dtype, scale: float) -> None:
    """In the accumulation type, by the factor rounded to it; float64 by all of its digits."""
    source, out = sample(dtype, BLOCK + 3, 1), Guarded.make(dtype, BLOCK + 3)
    values = values_of(source)
    with np.errstate(all="ignore"):
        expected = encode(values * values.dtype.type(scale), dtype)
    launcher.combine(out.tensor, [source], CombineSpec(get_op("sum"), scale=scale))
    same(out.tensor, expected)
    out.check()
    with np.errstate(all="ignore"):
        divided = encode(values * values.dtype.type(scale) / values.dtype.type(3), dtype)
    launcher.combine(out.tensor, [source], CombineSpec(get_op("avg"), scale=scale, divisor=3))
    same(out.tensor, divided)


@triton.jit
def mixes_wide_into_narrow(first: Any, second: Any) -> Any:
    return first[0] + first[1], first[1] + second[1]


@triton.jit
def returns_too_few(first: Any, second: Any) -> Any:
    return first[0], second[0]


@triton.jit
def returns_one(first: Any, second: Any) -> Any:
    return first[0] + second[0]


def test_results_of_the_wrong_shape_are_refused() -> None:
    launcher = LAUNCHERS["interpreter"]
    op = ReduceOp(
        "mixes",
        mixes_wide_into_narrow,
        None,
        ANY_FLOAT,
        lanes=(Lane("key", ANY_FLOAT), Lane("row", ANY_FLOAT, wide=True)),
    )
    values = (torch.ones(4), torch.ones(12))
    with pytest.raises(Exception, match="returns for a lane that is not wide must not depend on wide lanes"):
        launcher.combine(values, [values, values], CombineSpec(op))
    wrong: dict[str, Any] = {"must return one value for each lane": returns_too_few, "must return a tuple": returns_one}
    for text, function in wrong.items():
        operands = tallies(5, 2, torch.float32, torch.int64)
        with pytest.raises(Exception, match=text):
            launcher.combine(operands[0], operands, CombineSpec(replace(TALLY, combine=function)))


def test_complex_lanes_are_refused() -> None:
    numbers = frozenset({torch.complex64})
    op = ReduceOp("pairs", tally, None, numbers, lanes=(Lane("one", numbers), Lane("other", numbers)))
    values = (torch.ones(4, dtype=torch.complex64),) * 2
    with pytest.raises(TypeError, match="'pairs' has several lanes: Triton kernels take no complex elements there"):
        LAUNCHERS["interpreter"].combine(values, [values, values], CombineSpec(op))

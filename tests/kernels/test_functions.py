"""Operators given by functions on the eager launcher: what the functions see, and what they may do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from microddp_kernels import CombineSpec, Lane, ReduceOp
from microddp_kernels.launchers import EagerLauncher
from microddp_kernels.scratch import BLOCK_NUMEL
from tests.kernels.oracle import FLOATS8, Guarded, bits_of, fold, same, sample

pytestmark = pytest.mark.timeout(60)

LAUNCHER = EagerLauncher()
DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int16, torch.bool, *FLOATS8})
TWO_LANES = (Lane("first", DTYPES), Lane("second", DTYPES))
ROWS = (Lane("score", DTYPES), Lane("row", DTYPES, wide=True))


def op_of(function: Any, name: str = "mine", lanes: tuple[Lane, ...] = (), **more: Any) -> ReduceOp:
    return ReduceOp(name, None, None, DTYPES, lanes, torch_function=function, **more)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_functions_see_the_accumulation_type(dtype: torch.dtype, count: int) -> None:
    """And what they return is rounded once, at the end; of truth values, what is not zero is True."""
    seen: set[torch.dtype] = set()

    def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        seen.update((first.dtype, second.dtype))
        return first + second

    operands = [sample(dtype, 1003, seed) for seed in range(count)]
    for alias in (None, 0, count - 1):
        guarded = [Guarded.holding(each) for each in operands]
        out = Guarded.make(dtype, 1003) if alias is None else guarded[alias]
        LAUNCHER.combine(out.tensor, [each.tensor for each in guarded], CombineSpec(op_of(add)))
        same(out.tensor, fold("sum", operands, dtype))
        for each in (out, *guarded):
            each.check()
    widened = torch.int32 if dtype == torch.bool else torch.float32 if dtype in (torch.bfloat16, *FLOATS8) else dtype
    assert seen == {widened}


def test_truth_values_are_zeros_and_ones() -> None:
    """Also between steps, and from bytes above 1."""
    seen: set[int] = set()

    def count(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        seen.update(first.tolist() + second.tolist())
        return -2 * (first + second)

    odd_bytes = torch.tensor([0, 1, 7, 255] * 9, dtype=torch.uint8).view(torch.bool)
    out = torch.empty(36, dtype=torch.bool)
    LAUNCHER.combine(out, [odd_bytes] * 4, CombineSpec(op_of(count)))
    assert seen == {0, 1} and out.view(torch.uint8).tolist() == [0, 1, 1, 1] * 9


def test_a_wider_accumulation_type() -> None:
    op = op_of(torch.add, accumulate=torch.float64)
    operands = [torch.full((9,), value) for value in (1.0, 2.0**-30, -1.0)]
    out = torch.empty(9)
    LAUNCHER.combine(out, operands, CombineSpec(op))
    assert out.tolist() == [2.0**-30] * 9


IN_PLACE: list[tuple[Callable[..., Any], str]] = [
    (lambda first, second: first.add_(second), "sum"),
    (lambda first, second: second.add_(first), "sum"),
    (lambda first, second: second.add_(first).clone(), "sum"),
    (lambda first, second: first, "first"),
    (lambda first, second: second, "last"),
    (lambda first, second: (first.zero_(), second)[1], "last"),
    (lambda first, second: (first + second).double(), "sum"),
    (lambda first, second: torch.stack([first, first + second], 1)[:, 1], "sum"),
]


@pytest.mark.parametrize(("function", "what"), IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_may_change_or_return_their_arguments(
    function: Callable[..., Any], what: str, dtype: torch.dtype
) -> None:
    """The operands, which belong to callers, stay as they are; the exception is the one that is ``out``."""
    numel = BLOCK_NUMEL * torch.get_num_threads() + 5
    for count, alias in itertools.product((2, 3, 4), (None, 0, 1)):
        operands = [sample(dtype, numel, seed) for seed in range(count)]
        kept = [each.clone() for each in operands]
        out = torch.empty(numel, dtype=dtype) if alias is None else operands[alias]
        LAUNCHER.combine(out, operands, CombineSpec(op_of(function)))
        same(out, fold("sum", kept, dtype) if what == "sum" else bits_of(kept[0 if what == "first" else -1]))
        for each, before in zip(operands, kept, strict=True):
            assert each is out or np.array_equal(bits_of(each), bits_of(before)), "an operand was written"


def test_one_tensor_as_both_operands() -> None:
    operand = torch.arange(50.0)
    LAUNCHER.combine(operand, [operand, operand], CombineSpec(op_of(lambda first, second: first.mul_(second))))
    assert operand.tolist() == [value**2 for value in range(50)]


def reference(function: Callable[..., Any], operands: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The fold by a pure function of NumPy arrays."""
    total = tuple(each.numpy() for each in operands[0])
    for operand in operands[1:]:
        total = function(total, tuple(each.numpy() for each in operand))
    return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in total)


LANES: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda first, second: (second[1], first[0]),) * 2,
    (lambda first, second: (first[1], first[0]),) * 2,
    (
        lambda first, second: [first[0].add_(second[1]), second[0]],
        lambda first, second: (first[0] + second[1], second[0]),
    ),
    (lambda first, second: (first[0] * second[0] - first[1], second[1] + first[0]),) * 2,
]


@pytest.mark.parametrize(("function", "pure"), LANES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_lanes_may_be_swapped(function: Callable[..., Any], pure: Callable[..., Any], count: int) -> None:
    """Results that are memory of other lanes are not overwritten before they are stored."""
    for alias in (None, *range(count)):
        operands = [tuple(torch.arange(7) + 10 * (2 * index + lane) for lane in (0, 1)) for index in range(count)]
        operands = [tuple(each.int() for each in lanes) for lanes in operands]
        kept = [tuple(each.clone() for each in lanes) for lanes in operands]
        out = (
            (torch.empty(7, dtype=torch.int32), torch.empty(7, dtype=torch.int32)) if alias is None else operands[alias]
        )
        LAUNCHER.combine(out, operands, CombineSpec(op_of(function, lanes=TWO_LANES)))
        assert all(torch.equal(*pair) for pair in zip(out, reference(pure, kept), strict=True))
        for lanes, before in zip(operands, kept, strict=True):
            assert lanes is out or all(torch.equal(*pair) for pair in zip(lanes, before, strict=True))


def test_lanes_of_several_types() -> None:
    seen: set[tuple[torch.dtype, ...]] = set()

    def count_true(first: Any, second: Any) -> Any:
        seen.update(tuple(each.dtype for each in operand) for operand in (first, second))
        return first[0] + second[0], first[1] | second[1]

    operands = [
        (torch.full((5,), value, dtype=torch.bfloat16), torch.tensor([True, False, index == 2, False, True]))
        for index, value in enumerate((256.0, 1.0, 1.0))
    ]
    out = (torch.empty(5), torch.empty(5, dtype=torch.bool))
    LAUNCHER.combine(out, operands, CombineSpec(op_of(count_true, lanes=TWO_LANES)))
    assert seen == {(torch.float32, torch.int32)}
    assert out[0].tolist() == [258.0] * 5 and out[1].tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("num_rows", [0, 1, 5, 3000])
@pytest.mark.parametrize("width", [1, 3, 64, 3 * BLOCK_NUMEL])
def test_wide_lanes(num_rows: int, width: int) -> None:
    """The better row wins: functions get (rows, 1) beside (rows, width), in whole rows, whatever the size."""
    if num_rows * width > 2_000_000:
        num_rows = 5
    shapes: set[tuple[int, ...]] = set()

    def better(first: Any, second: Any) -> Any:
        shapes.update((tuple(first[0].shape[1:]), tuple(second[1].shape[1:])))
        assert first[0].shape[0] == first[1].shape[0]
        return torch.maximum(first[0], second[0]), torch.where(first[0] >= second[0], first[1], second[1])

    random = torch.Generator().manual_seed(1)
    scores = [torch.randint(0, 9, (num_rows,), generator=random).float() for _ in range(3)]
    operands = [(score, torch.randn(num_rows * width, generator=random).to(torch.bfloat16)) for score in scores]
    winner = np.argmax(torch.stack(scores).numpy(), axis=0)
    rows = np.stack([bits_of(each[1]).reshape(num_rows, width) for each in operands])
    expected = rows[winner, np.arange(num_rows)].reshape(-1)
    for alias in (None, 0, 2):
        copies = [tuple(each.clone() for each in lanes) for lanes in operands]
        out = tuple(torch.empty_like(each) for each in copies[0]) if alias is None else copies[alias]
        LAUNCHER.combine(out, copies, CombineSpec(op_of(better, lanes=ROWS)))
        assert np.array_equal(out[0].numpy(), torch.stack(scores).numpy().max(axis=0))
        same(out[1], expected)
    assert shapes == ({(1,), (width,)} if num_rows else set())


WRONG: list[tuple[Callable[..., Any], tuple[Lane, ...], type[Exception], str]] = [
    (lambda first, second: None, (), TypeError, "'mine' must return 1 tensor, got NoneType"),
    (lambda first, second: (first, second), (), TypeError, "'mine' must return 1 tensor, got tuple"),
    (lambda first, second: first[:1], (), ValueError, r"got \(1,\) instead of \(6,\)"),
    (lambda first, second: first.sum(), (), ValueError, r"got \(\) instead of \(6,\)"),
    (lambda first, second: torch.complex(first, second), (), TypeError, "must return float32, got complex64"),
    (lambda first, second: (first + second).to(torch.int8), (), TypeError, "must return float32, got int8"),
    (lambda first, second: (first + second).half(), (), TypeError, "must return float32, got float16"),
    (lambda first, second: first[0], TWO_LANES, TypeError, "must return 2 tensors, got Tensor"),
    (lambda first, second: (*first, *second), TWO_LANES, TypeError, "must return 2 tensors, got Tensor, Tensor, T"),
    (lambda first, second: (first[0] + first[1], first[1]), ROWS, ValueError, r"got \(6, 2\) instead of \(6, 1\)"),
]


@pytest.mark.parametrize(("function", "lanes", "error", "text"), WRONG)
def test_what_a_function_must_return(
    function: Callable[..., Any], lanes: tuple[Lane, ...], error: type[Exception], text: str
) -> None:
    operand = (torch.ones(6), torch.ones(12 if lanes == ROWS else 6)) if lanes else torch.ones(6)
    with pytest.raises(error, match=text):
        LAUNCHER.combine(operand, [operand, operand], CombineSpec(op_of(function, lanes=lanes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_eager", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_finalizing_in_torch(dtype: torch.dtype, has_eager: bool, count: int) -> None:
    """In place, for a fold of any number of operands; the operands stay as they are, and it is rounded once."""

    def finalize(total: torch.Tensor, world_size: int) -> torch.Tensor:
        return total.div_(world_size).add_(1)

    op = ReduceOp(
        "mine",
        None,
        torch.add if has_eager else None,
        DTYPES,
        torch_function=torch.add,
        finalize="named",
        torch_finalize=finalize,
    )
    operands = [sample(dtype, 1000, seed) for seed in range(count)]
    kept = [each.clone() for each in operands]
    out = torch.empty(1000, dtype=dtype)
    LAUNCHER.combine(out, operands, CombineSpec(op, divisor=7))
    wide = [each.float().numpy() for each in kept]
    with np.errstate(all="ignore"):
        total = wide[0]
        for each in wide[1:]:
            total = total + each
        expected = torch.from_numpy(total / np.float32(7) + np.float32(1)).to(dtype)
    same(out, bits_of(expected))
    assert all(np.array_equal(bits_of(each), bits_of(before)) for each, before in zip(operands, kept, strict=True))

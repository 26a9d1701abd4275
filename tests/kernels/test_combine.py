"""Every operator on every element type, on the launchers that run here, against an oracle in NumPy and Python ints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from microddp_kernels import CombineSpec, get_op
from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from microddp_kernels.scratch import BLOCK_NUMEL
from tests.kernels.oracle import (
    CELLS,
    FLOATS,
    FLOATS8,
    INTEGERS,
    LEGAL,
    Guarded,
    bits_of,
    encode,
    fold,
    same,
    sample,
    special_pairs,
    values_of,
)

pytestmark = pytest.mark.timeout(60)

BLOCK = 128
LAUNCHERS: dict[str, Launcher] = {"eager": EagerLauncher(), "interpreter": InterpreterLauncher(block=BLOCK)}
on_each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())
on_each_cell = pytest.mark.parametrize(
    ("name", "dtype"), CELLS, ids=[f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in CELLS]
)


def check(
    launcher: Launcher,
    name: str,
    operands: Sequence[torch.Tensor],
    out_dtype: torch.dtype | None = None,
    weights: tuple[int, ...] | None = None,
    divisor: int | None = None,
    alias: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Combines copies of ``operands`` in poisoned memory, ``out`` being one of them with ``alias``; returns ``out``."""
    guarded = [Guarded.holding(operand) for operand in operands]
    fresh = Guarded.make(out_dtype or operands[0].dtype, operands[0].numel())
    out = fresh if alias is None else guarded[alias]
    expected = fold(name, operands, out.tensor.dtype, weights, divisor, scale)
    how = CombineSpec(get_op(name), weights, divisor, scale)
    assert launcher.combine(out.tensor, [each.tensor for each in guarded], how) is None
    same(out.tensor, expected)
    for each in (fresh, *guarded):
        each.check()
    for each, operand in zip(guarded, operands, strict=True):
        assert each is out or np.array_equal(bits_of(each.tensor), bits_of(operand)), "an operand was written"
    return out.tensor


@on_each_launcher
@on_each_cell
def test_two_operands(launcher: Launcher, name: str, dtype: torch.dtype) -> None:
    """Special values in every pair, then random bit patterns; into fresh memory, then over each operand."""
    specials = special_pairs(dtype)
    first, second = (torch.cat([each, sample(dtype, 3 * BLOCK + 5, seed)]) for seed, each in enumerate(specials))
    for alias in (None, 0, 1):
        check(launcher, name, [first, second], alias=alias)


@on_each_launcher
@on_each_cell
def test_many_operands(launcher: Launcher, name: str, dtype: torch.dtype) -> None:
    """Three to nine operands, with ``out`` fresh and over the first, a middle and the last one."""
    operands = [sample(dtype, BLOCK + 3, seed) for seed in range(9)]
    for count in (3, 4, 9):
        check(launcher, name, operands[:count])
    for alias in (0, 1, 2):
        check(launcher, name, operands[:3], alias=alias)


@on_each_launcher
@on_each_cell
def test_one_operand(launcher: Launcher, name: str, dtype: torch.dtype) -> None:
    """Nothing is done to it; or it is divided, scaled, or both."""
    operand = torch.cat([special_pairs(dtype)[1], sample(dtype, BLOCK + 5, 1)])
    for alias in (None, 0):
        check(launcher, name, [operand], alias=alias)
    if name == "avg":
        check(launcher, name, [operand], divisor=3)
        check(launcher, name, [operand], scale=0.1, alias=0)
        check(launcher, name, [operand], scale=-1e-3, divisor=7)


@on_each_launcher
@pytest.mark.parametrize("dtype", LEGAL["avg"])
@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_means(launcher: Launcher, dtype: torch.dtype, count: int) -> None:
    """Divided and weighted folds of every number of operands, aliasing each operand in turn."""
    operands = [sample(dtype, BLOCK + 3, seed) for seed in range(count)]
    alias = count % 3 if count % 2 else None
    check(launcher, "avg", operands, divisor=count, alias=alias)
    check(launcher, "avg", operands, weights=tuple(range(1, count + 1)), alias=alias)


@on_each_launcher
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 40000.0),
        (torch.float16, 2.0**-24),
        (torch.float8_e4m3fn, 448.0),
        (torch.float8_e4m3fn, 2.0**-9),
        (torch.float8_e5m2, 57344.0),
        (torch.float8_e5m2, 2.0**-16),
    ],
)
def test_narrow_means_neither_overflow_nor_flush(
    launcher: Launcher, count: int, dtype: torch.dtype, value: float
) -> None:
    """The mean that travels: (p*a + q*b) / (p + q) of equal values is that value, whatever has been covered."""
    travelling = torch.full((5,), value, dtype=dtype)
    for covered in range(1, count):
        travelling = check(launcher, "avg", [travelling, torch.full_like(travelling, value)], weights=(covered, 1))
    assert travelling.tolist() == [value] * 5
    divided = check(launcher, "avg", [torch.full((5,), value, dtype=dtype)] * count, divisor=count)
    assert divided.tolist() == [value] * 5


@on_each_launcher
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_16_bit_results_are_rounded_once(launcher: Launcher, dtype: torch.dtype, name: str) -> None:
    """Against the exact value: float64 holds sums of values of similar size and all products."""
    first, second = (torch.rand(1000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    left, right = (values_of(each).astype(np.float64) for each in (first, second))
    exact = left + right if name == "sum" else left * right
    assert all(Fraction(x) + Fraction(y) == Fraction(x + y) for x, y in zip(left, right, strict=True))
    out = torch.empty(1000, dtype=dtype)
    launcher.combine(out, [first, second], CombineSpec(get_op(name)))
    same(out, encode(exact, dtype))


@on_each_launcher
def test_bfloat16_folds_keep_small_addends(launcher: Launcher) -> None:
    """256 + 7 ones is 264 when rounded once; rounding at each step stays at 256."""
    operands = [torch.full((16,), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 7)]
    assert check(launcher, "sum", operands).tolist() == [264.0] * 16


@on_each_launcher
@pytest.mark.parametrize("dtype", FLOATS)
def test_division_is_correctly_rounded(launcher: Launcher, dtype: torch.dtype) -> None:
    """On enough elements that a product with the reciprocal, rounded twice, shows even in 16 bits."""
    launcher = InterpreterLauncher() if isinstance(launcher, InterpreterLauncher) else launcher
    operands = [sample(dtype, 40_000, seed) for seed in range(2)]
    check(launcher, "avg", operands, divisor=3)
    check(launcher, "avg", operands, weights=(4, 3))


MIXTURES = [
    (torch.float32, (torch.float32, torch.bfloat16)),
    (torch.float32, (torch.float16, torch.float16, torch.float32)),
    (torch.bfloat16, (torch.float32, torch.bfloat16, torch.bfloat16)),
    (torch.float16, (torch.float16, torch.float32)),
    (torch.bfloat16, (torch.float16, torch.float16)),
    (torch.float32, (torch.bfloat16, torch.bfloat16)),
    (torch.float64, (torch.float64, torch.float32)),
    (torch.float64, (torch.float32, torch.bfloat16)),
    (torch.float32, (torch.float64, torch.float32)),
    (torch.float32, (torch.float32, torch.float8_e4m3fn)),
    (torch.float8_e4m3fn, (torch.float32, torch.float8_e5m2, torch.float8_e4m3fn)),
    (torch.float8_e5m2, (torch.float8_e5m2, torch.float16)),
    (torch.bfloat16, (torch.float8_e5m2, torch.float8_e5m2)),
    (torch.float64, (torch.float8_e4m3fn, torch.float64)),
]


@on_each_launcher
@pytest.mark.parametrize("name", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize(("out_dtype", "dtypes"), MIXTURES)
def test_mixed_element_types(
    launcher: Launcher, name: str, out_dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A wider accumulator as ``out`` or as an operand, aliased where its type is the type of ``out``."""
    operands = [sample(dtype, BLOCK + 3, seed) for seed, dtype in enumerate(dtypes)]
    for alias in (None, *(index for index, dtype in enumerate(dtypes) if dtype == out_dtype)):
        check(launcher, name, operands, out_dtype, alias=alias)
    if name == "avg":
        check(launcher, name, operands, out_dtype, divisor=7)
        check(launcher, name, operands, out_dtype, weights=(3, 1, 2)[: len(dtypes)])


@on_each_launcher
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex64, torch.bool]
)
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7])
def test_sizes_around_a_block(launcher: Launcher, dtype: torch.dtype, numel: int) -> None:
    operands = [sample(dtype, numel, seed) for seed in range(3)]
    for name, count in itertools.product(("prod" if dtype.is_complex else "max", "sum"), (2, 3)):
        check(launcher, name, operands[:count])
    copied = Guarded.make(dtype, numel)
    assert launcher.copy(copied.tensor, operands[0]) is None
    assert np.array_equal(bits_of(copied.tensor), bits_of(operands[0]))
    copied.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("numel", [BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 2 * BLOCK_NUMEL + 7])
def test_sizes_around_the_blocks_of_the_eager_launcher(dtype: torch.dtype, numel: int) -> None:
    operands = [sample(dtype, numel, seed) for seed in range(3)]
    for name, count, alias in (("sum", 3, 1), ("max", 2, 0), ("min", 2, None), ("min", 3, 2)):
        check(LAUNCHERS["eager"], name, operands[:count], alias=alias)
    check(LAUNCHERS["eager"], "avg", operands, weights=(1, 2, 3), alias=2)
    check(LAUNCHERS["eager"], "avg", operands, torch.float32, divisor=3)


@pytest.mark.parametrize(("name", "dtype"), [("max", torch.uint16), ("min", torch.uint64), ("prod", torch.complex64)])
def test_blocks_of_types_that_torch_does_not_compute_on(name: str, dtype: torch.dtype) -> None:
    operands = [sample(dtype, BLOCK_NUMEL + 7, seed) for seed in range(3)]
    for count, alias in ((2, None), (2, 1), (3, 0)):
        check(LAUNCHERS["eager"], name, operands[:count], alias=alias)


@on_each_launcher
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS8])
def test_zeros_and_nan_do_not_depend_on_the_order_of_operands(launcher: Launcher, dtype: torch.dtype) -> None:
    """-0.0 is below +0.0 in vectors and in tails; NaN wins from either side; a sum of -0.0 keeps its sign."""
    for first, second, smallest, largest in (
        (0.0, -0.0, "-0.0", "0.0"),
        (-0.0, -0.0, "-0.0", "-0.0"),
        (float("nan"), 5.0, "nan", "nan"),
        (-0.0, -1.0, "-1.0", "-0.0"),
    ):
        pair = [torch.full((37,), value, dtype=dtype) for value in (first, second)]
        for operands in (pair, pair[::-1]):
            assert {str(each) for each in check(launcher, "min", operands).tolist()} == {smallest}
            assert {str(each) for each in check(launcher, "max", operands).tolist()} == {largest}
    negative_zeros = [torch.full((37,), -0.0, dtype=dtype)] * 3
    assert {str(each) for each in check(launcher, "sum", negative_zeros).tolist()} == {"-0.0"}


@on_each_launcher
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(launcher: Launcher, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    largest, one = (torch.full((3,), value, dtype=dtype) for value in (limits.max, 1))
    assert check(launcher, "sum", [largest, one]).tolist() == [limits.min] * 3
    wrapped = (9 * limits.max - limits.min) % 2**limits.bits + limits.min
    assert check(launcher, "sum", [largest] * 9).tolist() == [wrapped] * 3


@on_each_launcher
def test_bool_stores_zeros_and_ones_only(launcher: Launcher) -> None:
    """However many are true, and even from bytes above 1, which no correct program makes."""
    true, odd_bytes = torch.ones(19, dtype=torch.bool), torch.full((19,), 6, dtype=torch.uint8).view(torch.bool)
    for operands in ([true] * 2, [true] * 64, [odd_bytes], [odd_bytes, true], [odd_bytes, odd_bytes, odd_bytes]):
        for name, expected in (("sum", 1), ("prod", 1), ("max", 1), ("min", 1), ("bxor", len(operands) % 2)):
            out = torch.empty(19, dtype=torch.bool)
            launcher.combine(out, operands, CombineSpec(get_op(name)))
            assert out.view(torch.uint8).tolist() == [expected] * 19

"""all_reduce against exact integers, formulas and float64, for every algorithm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from microddp import Communicator
from tests.api.tools import ALGORITHMS, ORDERED, run, same_bits

pytestmark = pytest.mark.timeout(60)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@every_algorithm
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("slice_nbytes", [None, 16])
def test_digit_of_each_rank_appears_once(algorithm: str, world_size: int, slice_nbytes: int | None) -> None:
    expected = [(i + 1) * int("1" * world_size) for i in range(7)]

    def body(comm: Communicator) -> None:
        comm._planner._slice_nbytes = slice_nbytes
        x = (torch.arange(7) + 1) * 10**comm.rank
        original = x.clone()
        for _ in range(2):
            out = torch.full((7,), -1)
            assert comm.all_reduce(x, algorithm=algorithm, out=out) is out
            assert out.tolist() == expected
            assert torch.equal(x, original)
        same = original.clone()
        view = same[:]
        assert comm.all_reduce(same, algorithm=algorithm, out=view) is view
        assert same.tolist() == expected
        assert comm.all_reduce(x, algorithm=algorithm) is x
        assert x.tolist() == expected
        assert comm.last_choice is not None and comm.last_choice.algorithm == algorithm

    run(body, world_size)


@every_algorithm
@pytest.mark.parametrize("world_size", [2, 4, 6, 8])
def test_any_size_and_nothing_beside_it_is_touched(algorithm: str, world_size: int) -> None:
    sizes = sorted({*range(world_size + 3), 2 * world_size - 1, 2 * world_size + 1, 10, 33})

    def body(comm: Communicator) -> None:
        for size in sizes:
            big = torch.full((size + 59,), 777.0)
            x = big[5 : 5 + size]
            x.copy_(torch.arange(size) + 100.0 * comm.rank)
            comm.all_reduce(x, algorithm=algorithm)
            wanted = [world_size * i + 100 * world_size * (world_size - 1) // 2 for i in range(size)]
            assert x.tolist() == wanted, size
            assert bool((big[:5] == 777).all()) and bool((big[5 + size :] == 777).all())

    run(body, world_size)


SHAPES: list[tuple[int, ...]] = [(), (1, 1, 1, 5, 1), (0,), (3, 0, 2), (2, 3)]


@every_algorithm
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_kept(algorithm: str, shape: tuple[int, ...]) -> None:
    def body(comm: Communicator) -> None:
        for dtype in (torch.float32, torch.int64):
            x = torch.full(shape, comm.rank + 1, dtype=dtype)
            assert comm.all_reduce(x, algorithm=algorithm) is x
            assert x.shape == torch.Size(shape)
            assert x.tolist() == torch.full(shape, 6, dtype=dtype).tolist()

    run(body, 3)


FOLDS: list[tuple[str, torch.dtype, list[float], float]] = [
    ("max", torch.float32, [-1, -2, -3, -4], -1),
    ("min", torch.float32, [1, 2, 3, 4], 1),
    ("prod", torch.float64, [2, 3, 4, 5], 120),
    ("avg", torch.float32, [1, 2, 3, 4], 2.5),
    ("avg", torch.float16, [40000] * 4, 40000),
    ("band", torch.int32, [0b1110] * 4, 14),
    ("bor", torch.int64, [12, 10, 0, 1], 15),
    ("bxor", torch.int64, [12, 10, 0, 0], 6),
    ("max", torch.float32, [-math.inf] * 4, -math.inf),
    ("sum", torch.float32, [-0.0] * 4, -0.0),
    ("sum", torch.float32, [math.inf, -math.inf, 1, 1], math.nan),
    ("prod", torch.float32, [0, math.inf, 1, 1], math.nan),
    ("min", torch.float32, [1, math.nan, 3, 4], math.nan),
    ("max", torch.bfloat16, [1, math.nan, 3, 4], math.nan),
    ("max", torch.float16, [math.nan, 5, 5, 5], math.nan),
    ("sum", torch.int64, [2**53 + 1, 0, 0, 0], 2**53 + 1),
    ("max", torch.int64, [2**63 - 1, 2**63 - 2, 0, 0], 2**63 - 1),
    ("prod", torch.int64, [3037000499, 1, 1, 1], 3037000499),
    ("sum", torch.int32, [2**24 + 1, 0, 0, 0], 2**24 + 1),
    ("sum", torch.int8, [120, 100, 0, 0], -36),
    ("sum", torch.uint8, [200, 100, 0, 0], 44),
    ("sum", torch.int32, [2**31 - 1, 1, 0, 0], -(2**31)),
    ("sum", torch.bool, [True, True, False, False], True),
    ("prod", torch.bool, [True, True, False, True], False),
    ("min", torch.bool, [True] * 4, True),
    ("bxor", torch.bool, [True, True, False, False], False),
]


@every_algorithm
@pytest.mark.parametrize(("op", "dtype", "values", "expected"), FOLDS)
def test_operators_are_exact(algorithm: str, op: str, dtype: torch.dtype, values: list[Any], expected: Any) -> None:
    """Five elements on four ranks: chunks of one or no element, so that padding of any kind would show."""

    def body(comm: Communicator) -> None:
        x = torch.full((5,), values[comm.rank], dtype=dtype)
        comm.all_reduce(x, op=op, algorithm=algorithm)
        wanted = torch.full((5,), expected, dtype=dtype)
        if isinstance(expected, float) and math.isnan(expected):
            assert bool(x.isnan().all())
        else:
            assert same_bits(x, wanted), x
        if dtype is torch.bool:
            assert x.view(torch.uint8).tolist() == [int(expected)] * 5

    run(body, 4)


@pytest.mark.parametrize("algorithm", ["naive", "direct"])
def test_bfloat16_is_rounded_once(algorithm: str) -> None:
    def body(comm: Communicator) -> list[float]:
        x = torch.full((16,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
        values: list[float] = comm.all_reduce(x, algorithm=algorithm).tolist()
        return values

    assert run(body, 8) == [[264.0] * 16] * 8  # 263, rounded to even


@every_algorithm
def test_random_floats_are_near_float64_and_the_same_everywhere(algorithm: str) -> None:
    inputs = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    exact = inputs.double().sum(0)
    bound = 4 * 2.0**-23 * inputs.double().abs().sum(0)

    def body(comm: Communicator) -> torch.Tensor:
        return comm.all_reduce(inputs[comm.rank].clone(), algorithm=algorithm)

    results = run(body, 5)
    for result in results:
        assert bool(((result.double() - exact).abs() <= bound).all())
    alike = [same_bits(results[0], each) for each in results[1:]]
    assert any(alike) is all(alike) is (algorithm != "full_ring")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_rank_order_is_one_left_fold(dtype: torch.dtype, op: str) -> None:
    inputs = torch.randn(4, 333, generator=torch.Generator().manual_seed(2)).to(dtype)
    fold = inputs[0].float()
    for each in inputs[1:]:
        fold = fold + each.float()
    expected = (fold / 4 if op == "avg" else fold).to(dtype)

    def body(comm: Communicator) -> None:
        for slice_nbytes in (None, 64):
            comm._planner._slice_nbytes = slice_nbytes
            comm._planner._prepared.clear()
            for algorithm in (*ORDERED, None):
                x = inputs[comm.rank].clone()
                comm.all_reduce(x, op=op, algorithm=algorithm, order="rank")
                assert same_bits(x, expected), algorithm
        assert comm.last_choice is not None
        assert (comm.last_choice.algorithm, comm.last_choice.order) == ("direct", "rank")

    run(body, 4)


@pytest.mark.parametrize(("numel", "world_size"), [(1, 2), (64, 4), (1 << 20, 4), (1 << 20, 2)])
def test_what_none_chose_is_told_and_is_never_full_ring(numel: int, world_size: int) -> None:
    def body(comm: Communicator) -> Any:
        comm.all_reduce(torch.zeros(numel))
        return comm.last_choice

    choices = run(body, world_size)
    assert len(set(choices)) == 1
    choice = choices[0]
    assert choice.algorithm in ALGORITHMS and choice.algorithm != "full_ring"
    assert (choice.collective, choice.transport, choice.launcher) == ("all_reduce", "thread", "eager")
    assert choice.slice_nbytes >= 16 and choice.num_slots >= 2


@every_algorithm
def test_bytes_of_a_call_are_counted(algorithm: str) -> None:
    size = 4 * 16 * 4  # bytes; a multiple of 16 n

    def body(comm: Communicator) -> tuple[int, int]:
        comm.counters.reset()
        comm.all_reduce(torch.ones(size // 4), algorithm=algorithm)
        assert comm.counters.collectives == 1
        return comm.counters.bytes_sent, comm.counters.bytes_received

    counted = run(body, 4)
    formulas = {
        "naive": [(3 * size, 3 * size)] + [(size, size)] * 3,
        "tree": [(2 * size, 2 * size), (2 * size, 2 * size), (size, size), (size, size)],
        "ring": [(6 * size // 4, 6 * size // 4)] * 4,
        "full_ring": [(3 * size, 3 * size)] * 4,
        "direct": [(6 * size // 4, 6 * size // 4)] * 4,
    }
    assert counted == formulas[algorithm]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "prod"])
@every_algorithm
def test_world_of_one_sends_nothing_and_never_combines(
    algorithm: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microddp_kernels.launchers.eager.EagerLauncher.combine", lambda *_: pytest.fail("combined"))

    def body(comm: Communicator) -> None:
        x = torch.tensor([1.5, -2.0, math.nan])
        original = x.clone()
        assert same_bits(comm.all_reduce(x, op=op, algorithm=algorithm), original)
        out = torch.full_like(x, 7)
        assert comm.all_reduce(x, op=op, algorithm=algorithm, out=out) is out
        assert same_bits(out, original)
        assert comm.counters.messages_sent == comm.counters.messages_received == 0

    run(body, 1)


def test_plans_are_cached_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        x = torch.ones(64)
        for _ in range(3):
            comm.all_reduce(x)
        assert len(comm._planner._plans) == 1
        for size in range(300):
            comm.all_reduce(torch.ones(size))
        assert len(comm._planner._plans) <= 128
        assert len(comm._planner._prepared) <= 128
        comm.all_reduce(x.fill_(1))
        assert x.tolist() == [2.0] * 64

    run(body, 2)

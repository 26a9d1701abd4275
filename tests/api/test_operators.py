"""Operators beside the arithmetic: pickling, types that would be rounded twice, one rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import triton

import microddp
from microddp import Communicator, premul_sum
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks
from microddp_kernels import get_op
from tests import user_operators

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 60.0


def test_operators_are_pickled_by_name() -> None:
    half, minus = premul_sum(0.5), premul_sum(-0.0)
    for op in (user_operators.absmin, user_operators.moments, get_op("argmax"), get_op("sum"), half, minus):
        assert pickle.loads(pickle.dumps(op)) is op
        assert copy.deepcopy(op) is op
    assert str(minus.scale) == "-0.0" and premul_sum(0.0) is not minus
    results = microddp.run_processes(_reduced_by_given, 2, args=(user_operators.absmin, half), timeout=60)
    assert results == [([3.0, 3.0], [1.0, 1.0])] * 2

    @microddp.reduce_op(name="of_a_function", commutative=True)
    @triton.jit
    def of_a_function(first: Any, second: Any) -> Any:
        return first + second

    with pytest.raises(pickle.PicklingError, match="'of_a_function' cannot be pickled: .*not defined at the top of"):
        pickle.dumps(of_a_function)


def _reduced_by_given(comm: Communicator, op: Any, scaled: Any) -> tuple[list[float], list[float]]:
    x = comm.all_reduce(torch.tensor([-3.0, 3.0]) - comm.rank * torch.tensor([1.0, -1.0]), op)
    return x.tolist(), comm.all_reduce(torch.ones(2), scaled).tolist()


def test_what_is_folded_in_float64_is_not_rounded_twice() -> None:
    """It is refused before anything is sent, and the communicator stays usable."""

    def body(transport: Transport) -> list[str]:
        errors = []
        with Communicator(transport, timeout=TIMEOUT_S) as comm:
            for dtype, wire in ((torch.float32, "bfloat16"), (torch.float16, "float32"), (torch.float64, "float16")):
                with pytest.raises(TypeError, match="would be rounded twice") as caught:
                    comm.all_reduce(torch.ones(100, dtype=dtype), user_operators.precise, "ring", wire_dtype=wire)
                errors.append(str(caught.value))
            result = comm.all_reduce(torch.ones(100), user_operators.precise, "ring", wire_dtype="float64")
            assert result.tolist() == [2.0] * 100
        return errors

    first, second = run_thread_ranks(body, 2, timeout=TIMEOUT_S)
    assert "float32 cannot travel as bfloat16: 'precise' folds in float64, and that would be rounded twice" in first[0]
    assert "rank 1 of 2" in second[0]


def test_one_rank_does_not_call_the_operator() -> None:
    calls = []

    def counted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        calls.append(first.numel())
        return first + second

    @microddp.reduce_op(name="counted_sum", commutative=True, torch_function=counted)
    @triton.jit
    def counted_sum(first: Any, second: Any) -> Any:
        return first + second

    for world_size, most in ((1, 0), (2, 100)):
        calls.clear()
        microddp.run_threads(lambda comm: comm.all_reduce(torch.ones(5), counted_sum), world_size)
        assert bool(calls) is (world_size > 1) and len(calls) <= most

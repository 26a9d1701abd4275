"""What is refused before anything is sent: the error, on one rank and on all, and what the others hear."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from microddp import Communicator, RemoteError
from microddp_kernels import Lane, ReduceOp
from microddp_kernels.dtypes import FLOATS
from microddp_kernels.operators import get_op
from tests.api.tools import outcomes, run, same_bits

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class Refusal:
    """A call, what it raises, and words that its text must hold."""

    call: Callable[[Communicator], Any]
    kind: type[Exception]
    words: tuple[str, ...]


def _read_only() -> np.ndarray[Any, Any]:
    array = np.ones(3)
    array.setflags(write=False)
    return array


def _masked() -> Any:
    return np.ma.MaskedArray(np.ones(3), [True, False, False])


def _misaligned() -> Any:
    return np.zeros(3, dtype=[("a", np.int8), ("b", np.float64)])["b"]


def _overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.zeros(6, dtype=torch.int64)
    return memory.view(torch.float64)[:4], memory[2:]


def _later(first: Any, second: Any) -> Any:
    return second


pairs = ReduceOp(
    "pairs",
    None,
    None,
    FLOATS,
    lanes=(Lane("value", FLOATS), Lane("index", frozenset({torch.int64}))),
    torch_function=_later,
)
first = replace(get_op("sum"), name="first", commutative=False)
halfway = replace(get_op("sum"), name="halfway", associative=False)
ones = torch.ones
ALL_REDUCE = ("naive", "tree", "ring", "full_ring", "direct")
IN_ORDER = ("naive", "full_ring", "direct")

REFUSALS = {
    "needs grad": Refusal(lambda c: c.all_reduce(ones(3, requires_grad=True)), TypeError, ("detach()", "no_grad")),
    "result needs grad": Refusal(lambda c: c.all_gather(ones(3, requires_grad=True) * 2), TypeError, ("detach()",)),
    "out needs grad": Refusal(
        lambda c: c.all_reduce(ones(3), out=ones(3, requires_grad=True)), TypeError, ("out", "detach()")
    ),
    "sparse": Refusal(lambda c: c.all_reduce(ones(3).to_sparse()), TypeError, ("sparse", "to_dense()")),
    "meta": Refusal(lambda c: c.all_reduce(torch.ones(3, device="meta")), TypeError, ("meta", "thread", "cpu")),
    "quantized": Refusal(
        lambda c: c.all_reduce(torch.quantize_per_tensor(ones(3), 0.1, 0, torch.quint8)), TypeError, ("quint8",)
    ),
    "complex max": Refusal(
        lambda c: c.all_reduce(ones(3, dtype=torch.complex64), op="max"), TypeError, ("complex64", "float32")
    ),
    "float8 band": Refusal(
        lambda c: c.all_reduce(ones(3).to(torch.float8_e5m2), op="band"), TypeError, ("float8_e5m2", "uint32")
    ),
    "float128": Refusal(lambda c: c.all_gather(np.ones(3, np.longdouble)), TypeError, ("float128", "float64")),
    "wire of integers": Refusal(
        lambda c: c.all_reduce(ones(3).int(), wire_dtype="bfloat16"), TypeError, ("floats only", "int32", "bfloat16")
    ),
    "wire of 16 bits for float64": Refusal(
        lambda c: c.all_reduce(ones(3).double(), wire_dtype=torch.float16), TypeError, ("float64", "float16", "twice")
    ),
    "unknown wire": Refusal(lambda c: c.all_reduce(ones(3), wire_dtype="float12"), TypeError, ("float12", "dtype")),
    "wire 16": Refusal(lambda c: c.reduce(ones(3), wire_dtype=16), TypeError, ("wire_dtype", "16")),  # type: ignore[call-overload]
    "one tensor for lanes": Refusal(lambda c: c.all_reduce(ones(3), op=pairs), TypeError, ("value, index", "tuple")),
    "three tensors for two lanes": Refusal(
        lambda c: c.all_reduce((ones(3),) * 3, op=pairs), ValueError, ("value, index", "got 3")
    ),
    "lanes of different shapes": Refusal(
        lambda c: c.all_reduce((ones(3), ones(4).long()), op=pairs), ValueError, ("x[1]", "(4,)", "(3,)")
    ),
    "lanes of a wrong type": Refusal(
        lambda c: c.all_reduce((ones(3), ones(3)), op=pairs), TypeError, ("'index'", "float32", "int64")
    ),
    "lanes that share memory": Refusal(
        lambda c: c.all_reduce(_overlapping(), op=pairs), ValueError, ("lanes 0 and 1", "memory")
    ),
    "lanes in reduce_scatter": Refusal(
        lambda c: c.reduce_scatter((ones(4), ones(4).long()), op=pairs), ValueError, ("2 tensors", "all_reduce")
    ),
    "wire for lanes": Refusal(
        lambda c: c.all_reduce((ones(3), ones(3).long()), op=pairs, wire_dtype="float16"), TypeError, ("2 lanes",)
    ),
    "nested": Refusal(
        lambda c: c.all_reduce(torch.nested.nested_tensor([ones(2), ones(3)], layout=torch.jagged)),
        TypeError,
        ("nested",),
    ),
    "avg of integers": Refusal(lambda c: c.all_reduce(ones(1).int(), op="avg"), TypeError, ("avg", "int32", "float32")),
    "avg of bool": Refusal(lambda c: c.reduce(torch.tensor([True]), op="avg"), TypeError, ("avg", "bool")),
    "band of floats": Refusal(lambda c: c.all_reduce(ones(3), op="band"), TypeError, ("band", "float32", "int64")),
    "bxor of floats": Refusal(lambda c: c.reduce_scatter(ones(4), op="bxor"), TypeError, ("bxor", "float32")),
    "unknown op": Refusal(lambda c: c.all_reduce(ones(3), op="average"), ValueError, ("average", "sum", "avg", "bxor")),
    "op in capitals": Refusal(lambda c: c.all_reduce(ones(3), op="SUM"), ValueError, ("'SUM'", "sum")),
    "op of torch": Refusal(
        lambda c: c.all_reduce(ones(3), op=torch.distributed.ReduceOp.SUM),  # type: ignore[call-overload]
        TypeError,
        ("op must be",),
    ),
    "op None": Refusal(lambda c: c.all_reduce(ones(3), op=None), TypeError, ("op must be", "None")),  # type: ignore[call-overload]
    "op 7": Refusal(lambda c: c.all_reduce(ones(3), op=7), TypeError, ("op must be", "7")),  # type: ignore[call-overload]
    "op list": Refusal(lambda c: c.reduce(ones(3), op=[]), TypeError, ("op must be", "[]")),  # type: ignore[call-overload]
    "unknown algorithm": Refusal(
        lambda c: c.all_reduce(ones(3), algorithm="rinq"),
        ValueError,
        ("rinq", *ALL_REDUCE),
    ),
    "algorithm of another collective": Refusal(
        lambda c: c.all_reduce(ones(3), algorithm="broadcast"), ValueError, ("broadcast", "naive")
    ),
    "algorithm list": Refusal(lambda c: c.all_reduce(ones(3), algorithm=["ring"]), TypeError, ("algorithm", "str")),  # type: ignore[call-overload]
    "unknown order": Refusal(lambda c: c.all_reduce(ones(3), order="ranks"), ValueError, ("'ranks'", "'rank'")),
    "ring in rank order": Refusal(
        lambda c: c.all_reduce(ones(3), algorithm="ring", order="rank"), ValueError, IN_ORDER
    ),
    "tree in rank order": Refusal(
        lambda c: c.all_reduce(ones(3), algorithm="tree", order="rank"), ValueError, IN_ORDER
    ),
    "not commutative on ring": Refusal(
        lambda c: c.all_reduce(ones(3), op=first, algorithm="ring"),
        ValueError,
        ("'first' is not commutative", *IN_ORDER),
    ),
    "not commutative as it arrives": Refusal(
        lambda c: c.all_reduce(ones(3), op=first, algorithm="full_ring"), ValueError, ("full_ring with order='rank'",)
    ),
    "not commutative reduce": Refusal(lambda c: c.reduce(ones(3), op=first), ValueError, ("'first'", "all_reduce by")),
    "not associative on tree": Refusal(
        lambda c: c.all_reduce(ones(3), op=halfway, algorithm="tree"),
        ValueError,
        ("'halfway' is not associative", *IN_ORDER),
    ),
    "float": Refusal(lambda c: c.all_reduce(1.0), TypeError, ("float", "torch.tensor(value)")),
    "list": Refusal(lambda c: c.all_reduce([ones(1)]), TypeError, ("list", "each tensor")),
    "None": Refusal(lambda c: c.all_reduce(None), TypeError, ("NoneType",)),
    "NumPy scalar": Refusal(lambda c: c.all_reduce(np.float32(1)), TypeError, ("float32", "np.asarray")),
    "read-only": Refusal(lambda c: c.all_reduce(_read_only()), ValueError, ("read-only", "copy")),
    "read-only out": Refusal(lambda c: c.all_reduce(np.ones(3), out=_read_only()), ValueError, ("out", "read-only")),
    "byte order": Refusal(lambda c: c.all_reduce(np.ones(3, ">f8")), TypeError, (">f8", "byte order")),
    "masked": Refusal(lambda c: c.all_reduce(_masked()), TypeError, ("masked", "filled")),
    "misaligned strides": Refusal(lambda c: c.all_reduce(_misaligned()), ValueError, ("strides", "ascontiguousarray")),
    "structured": Refusal(lambda c: c.all_reduce(np.zeros(2, [("a", "i4")])), TypeError, ("not supported", "int32")),
    "objects": Refusal(lambda c: c.all_reduce(np.array([None])), TypeError, ("object", "int32")),
    "out of another shape": Refusal(
        lambda c: c.all_reduce(ones(2, 3), out=ones(3, 2)), ValueError, ("(3, 2)", "(2, 3)")
    ),
    "out of another dtype": Refusal(
        lambda c: c.all_reduce(ones(3), out=ones(3, dtype=torch.float64)), TypeError, ("float64", "float32")
    ),
    "out elsewhere": Refusal(lambda c: c.all_reduce(ones(3), out=torch.empty(3, device="meta")), TypeError, ("meta",)),
    "out expanded": Refusal(lambda c: c.all_reduce(ones(3), out=ones(1).expand(3)), ValueError, ("share memory",)),
    "gather out": Refusal(lambda c: c.all_gather(ones(3), out=ones(3)), ValueError, ("(3,)", "(6,)")),
    "scatter out": Refusal(lambda c: c.reduce_scatter(ones(4), out=ones(4)), ValueError, ("(4,)", "(2,)")),
    "root 2 of 2": Refusal(lambda c: c.broadcast(ones(3), root=2), ValueError, ("root 2", "2 ranks")),
    "root -1": Refusal(lambda c: c.reduce(ones(3), root=-1), ValueError, ("root -1",)),
    "root 0.0": Refusal(lambda c: c.reduce(ones(3), root=0.0), TypeError, ("root", "float")),  # type: ignore[call-overload]
    "root True": Refusal(lambda c: c.broadcast(ones(3), root=True), TypeError, ("root", "bool")),
}


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_all_ranks_alike(name: str) -> None:
    """Each raises its own error, and the communicator is usable afterwards: also for async calls."""
    refusal = REFUSALS[name]

    def body(comm: Communicator) -> None:
        work = comm.all_reduce(ones(1), async_op=True)
        with pytest.raises(refusal.kind) as raised:
            refusal.call(comm)
        assert type(raised.value) is refusal.kind
        for word in (*refusal.words, f"rank {comm.rank} of 2"):
            assert word in str(raised.value), str(raised.value)
        assert work.wait().tolist() == [2.0]
        assert comm.counters.collectives == 1
        x = torch.full((3,), comm.rank + 1.0)
        assert comm.all_reduce(x).tolist() == [3.0] * 3

    run(body, 2)


@pytest.mark.parametrize("name", ["needs grad", "unknown op", "read-only", "float", "root -1"])
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_refused_by_one_rank_reaches_all(name: str, odd_rank: int) -> None:
    refusal = REFUSALS[name]

    def body(comm: Communicator) -> Any:
        if comm.rank == odd_rank:
            return refusal.call(comm)
        return comm.all_reduce(torch.full((5,), comm.rank + 1.0), algorithm="naive")

    _check_one_refusal(outcomes(body, 4), odd_rank, refusal)


@pytest.mark.parametrize("odd_rank", [0, 2])
def test_refusal_waits_for_its_turn_behind_async_work(odd_rank: int) -> None:
    refusal = REFUSALS["unknown op"]
    has_refused = threading.Event()

    def body(comm: Communicator) -> Any:
        if comm.rank == odd_rank:
            work = comm.all_reduce(ones(1), async_op=True)
            try:
                return refusal.call(comm)
            finally:
                assert not work.done()
                has_refused.set()
                assert work.wait().tolist() == [4.0]
        assert has_refused.wait(10)
        comm.all_reduce(ones(1))
        return comm.all_reduce(ones(1))

    _check_one_refusal(outcomes(body, 4), odd_rank, refusal)


def _check_one_refusal(results: list[Any], odd_rank: int, refusal: Refusal) -> None:
    for rank, error in enumerate(results):
        if rank == odd_rank:
            assert type(error) is refusal.kind
        else:
            assert type(error) is RemoteError, error
            assert f"rank {odd_rank}" in str(error) and f"rank {rank} of 4" in str(error)
            assert refusal.words[0] in str(error)


@pytest.mark.parametrize("op", [first, halfway], ids=lambda op: op.name)
def test_lawless_operator_is_folded_from_the_left_in_rank_order(op: Any) -> None:
    """The first operand survives a projection; a halving shows where the parentheses are."""

    def halve(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(torch.add(a, b, out=out), 0.5, out=out)

    def keep(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(a)

    mine = replace(op, eager=keep if op is first else halve)
    expected = 10.0 if op is first else ((10 + 11) / 2 + 12) / 2 / 2 + 13 / 2

    def body(comm: Communicator) -> None:
        for algorithm, order in [("naive", None), ("direct", None), ("full_ring", "rank"), (None, None)]:
            x = torch.full((9,), 10.0 + comm.rank)
            comm.all_reduce(x, op=mine, algorithm=algorithm, order=order)
            assert x.tolist() == [expected] * 9

    run(body, 4)


def test_input_is_untouched_by_a_refused_call() -> None:
    x = torch.ones(3)
    before = x.clone()

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError):
            comm.all_reduce(x, algorithm="rinq")

    run(body, 2)
    assert same_bits(x, before) and x._version == 0

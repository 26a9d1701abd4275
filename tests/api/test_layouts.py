"""The caller's arrays: layouts, strides, overlaps, autograd, NumPy and CuPy."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from microddp import Communicator
from microddp.memory import overlaps_itself, shares_memory
from tests.api.tools import outcomes, run, same_bits

pytestmark = pytest.mark.timeout(60)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column": lambda base: base[:, 0],
    "transposed": lambda base: base.t(),
    "every other row": lambda base: base[::2],
    "inner block": lambda base: base[1:, 1:],
    "narrowed": lambda base: base.narrow(1, 2, 3),
    "contiguous with offset": lambda base: base[2],
    "unaligned": lambda base: base.view(-1)[1:],
    "one element": lambda base: base[1, 1],
    "diagonal": lambda base: base.diagonal(),
    "permuted": lambda base: base.view(2, 3, 6).permute(2, 0, 1),
    "interleaved": lambda base: base.view(-1).as_strided((3, 3), (3, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("algorithm", ["ring", "tree", "naive"])
def test_view_is_reduced_in_place_and_the_rest_untouched(name: str, algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        base = torch.arange(36.0).reshape(6, 6) + 100 * comm.rank
        before = base.clone()
        inside = _mask(name)
        x = VIEWS[name](base)
        wanted = 2 * VIEWS[name](torch.arange(36.0).reshape(6, 6)) + 100
        assert comm.all_reduce(x, algorithm=algorithm) is x
        assert torch.equal(x, wanted)
        assert torch.equal(base[~inside], before[~inside])
        assert x._version > 0

    run(body, 2)


def _mask(name: str) -> torch.Tensor:
    mask = torch.zeros(6, 6, dtype=torch.bool)
    VIEWS[name](mask).fill_(True)
    return mask


def test_ranks_may_differ_in_layout() -> None:
    def body(comm: Communicator) -> None:
        x = torch.arange(6).reshape(2, 3)
        mine = x if comm.rank == 0 else x.t().contiguous().t()
        comm.all_reduce(mine)
        assert torch.equal(mine, 2 * torch.arange(6).reshape(2, 3))

    run(body, 2)


OVERLAPPING: dict[str, Callable[[float], torch.Tensor]] = {
    "expanded": lambda value: torch.full((1,), value).expand(4),
    "stride 0": lambda value: torch.full((3,), value).as_strided((4,), (0,)),
    "sliding window": lambda value: torch.full((5,), value).as_strided((4, 2), (1, 1)),
    "hidden": lambda value: torch.full((9,), value).as_strided((3, 3), (2, 2)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_tensor_is_refused_in_place_and_read_out_of_place(name: str) -> None:
    def in_place(comm: Communicator) -> None:
        comm.all_reduce(OVERLAPPING[name](comm.rank + 1.0))

    for error in outcomes(in_place, 2):
        assert type(error) is ValueError
        assert "share memory" in str(error)

    def out_of_place(comm: Communicator) -> None:
        x = OVERLAPPING[name](comm.rank + 1.0)
        out = torch.empty(x.shape)
        comm.all_reduce(x, out=out)
        assert out.tolist() == torch.full(x.shape, 3.0).tolist()
        gathered = comm.all_gather(x)
        assert gathered.is_contiguous() and gathered[: x.shape[0]].tolist() == torch.ones(x.shape).tolist()

    run(out_of_place, 2)


def test_overlaps_are_told_exactly() -> None:
    buffer = torch.zeros(64)
    checked = 0
    for sizes in [(2, 2), (3, 2), (2, 3), (3, 3), (1, 3)]:
        for first in range(6):
            for second in range(6):
                view = buffer.as_strided(sizes, (first, second))
                places = {first * i + second * j for i in range(sizes[0]) for j in range(sizes[1])}
                assert overlaps_itself(view) is (len(places) < sizes[0] * sizes[1]), (sizes, first, second)
                for offset in range(0, 12, 3):
                    other = buffer.as_strided((2, 2), (5, 2), offset)
                    others = {offset + 5 * i + 2 * j for i in range(2) for j in range(2)}
                    assert shares_memory(view, other) is bool(places & others)
                    checked += 1
    assert checked == 5 * 36 * 4


def test_overlaps_of_elements_of_different_sizes_are_told_exactly() -> None:
    buffer = torch.zeros(64, dtype=torch.uint8)
    halves = buffer.view(torch.int16)
    found = {True: 0, False: 0}
    for stride in range(1, 5):
        for start in range(8):
            view = halves.as_strided((3,), (stride,), start)
            places = {2 * (start + stride * i) + byte for i in range(3) for byte in range(2)}
            for offset in range(20):
                other = buffer.as_strided((2, 2), (9, 4), offset)
                shared = bool(places & {offset + 9 * i + 4 * j for i in range(2) for j in range(2)})
                assert shares_memory(view, other) is shares_memory(other, view) is shared
                found[shared] += 1
    assert min(found.values()) > 100


def test_out_that_overlaps_is_refused_and_interleaved_is_not() -> None:
    def overlapping(comm: Communicator) -> None:
        buffer = torch.arange(8.0)
        comm.all_reduce(buffer[0:7], out=buffer[1:8])

    for error in outcomes(overlapping, 2):
        assert type(error) is ValueError
        assert "overlaps" in str(error)

    def interleaved(comm: Communicator) -> None:
        base = torch.arange(8.0).reshape(4, 2)
        out = base[:, 1]
        assert comm.all_reduce(base[:, 0], out=out) is out
        assert base.tolist() == [[0, 0], [2, 4], [4, 8], [6, 12]]

    run(interleaved, 2)


def test_temporary_and_neg_view() -> None:
    def body(comm: Communicator) -> None:
        assert comm.all_reduce(torch.ones(4) * (comm.rank + 1)).tolist() == [3.0] * 4
        x = torch.zeros(2, dtype=torch.complex64)
        x.imag.fill_(comm.rank + 1.0)
        view = x.conj().imag
        assert view.is_neg()
        assert comm.all_reduce(view) is view
        assert view.tolist() == [-3.0, -3.0]
        assert x.imag.tolist() == [3.0, 3.0]

    run(body, 2)


ARRAYS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "contiguous": lambda base: base,
    "reversed": lambda base: base[::-1],
    "reversed twice": lambda base: base[::-1, ::-2],
    "reversed column": lambda base: base[::-1, 1],
    "fortran": lambda base: base.T,
    "strided": lambda base: base[:, ::2],
    "zero-dimensional": lambda base: base[1, 1, ...],
    "empty": lambda base: base[:0],
    "empty reversed": lambda base: base[:0][::-1],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_view_is_reduced_in_place(name: str) -> None:
    def body(comm: Communicator) -> None:
        base = np.arange(24.0).reshape(4, 6) + 100 * comm.rank
        before, inside = base.copy(), np.zeros((4, 6), dtype=bool)
        ARRAYS[name](inside)[...] = True
        x = ARRAYS[name](base)
        wanted = 2 * ARRAYS[name](np.arange(24.0).reshape(4, 6)) + 100
        assert comm.all_reduce(x) is x
        assert np.array_equal(x, wanted)
        assert np.array_equal(base[~inside], before[~inside])
        out = np.full(x.shape, np.nan)
        assert comm.all_reduce(x, out=out) is out
        assert np.array_equal(out, 2 * wanted)

    run(body, 2)


def test_numpy_results_are_numpy_and_read_only_input_is_read() -> None:
    def body(comm: Communicator) -> None:
        x = np.arange(4) + comm.rank
        x.setflags(write=False)
        part = comm.reduce_scatter(x)
        assert isinstance(part, np.ndarray) and part.tolist() == [[1, 3], [5, 7]][comm.rank]
        gathered = comm.all_gather(x[::-1])
        assert isinstance(gathered, np.ndarray) and gathered.tolist() == [3, 2, 1, 0, 4, 3, 2, 1]
        assert comm.all_reduce(x, out=np.empty(4, x.dtype)).tolist() == [1, 3, 5, 7]
        assert x.tolist() == [comm.rank + i for i in range(4)]

    run(body, 2)


def test_root_of_a_broadcast_is_only_read() -> None:
    def body(comm: Communicator) -> None:
        for sevens in (torch.full((1,), 7.0).expand(3), torch.full((3,), 7.0)):
            x = sevens if comm.rank == 1 else torch.zeros(3)
            assert comm.broadcast(x, root=1) is x
            assert x.tolist() == [7.0] * 3
        array = np.full(3, 7.0 * comm.rank)
        array.setflags(write=comm.rank != 1)
        assert comm.broadcast(array, root=1) is array
        assert array.tolist() == [7.0] * 3

    run(body, 3)


class FakeCupyArray:
    """Has what the conversion needs of a CuPy array: DLPack, strides in bytes, slicing."""

    def __init__(self, tensor: torch.Tensor, reverse: bool = False) -> None:
        self.tensor, self.reverse = tensor, reverse
        self.shape = tuple(tensor.shape)
        sign = -1 if reverse else 1
        self.strides = tuple(sign * stride * tensor.element_size() for stride in tensor.stride())

    def __getitem__(self, index: Any) -> FakeCupyArray:
        assert index == (slice(None, None, -1),)
        return FakeCupyArray(self.tensor, not self.reverse)

    def __dlpack__(self, **options: Any) -> Any:
        assert not self.reverse, "torch knows no negative strides"
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_cupy_arrays_come_and_go_by_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("cupy")
    module.from_dlpack = FakeCupyArray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(FakeCupyArray, "__module__", "cupy")

    def body(comm: Communicator) -> None:
        x = FakeCupyArray(torch.arange(4.0) + comm.rank)
        assert comm.all_reduce(x) is x
        assert x.tensor.tolist() == [1.0, 3.0, 5.0, 7.0]
        scalar = FakeCupyArray(torch.tensor(comm.rank + 1.0))
        assert comm.all_reduce(scalar).tensor.item() == 3.0
        memory = torch.arange(3.0) * (comm.rank + 1)
        comm.broadcast(FakeCupyArray(memory, reverse=comm.rank == 0), root=0)
        assert memory.tolist() == ([0.0, 1.0, 2.0] if comm.rank == 0 else [2.0, 1.0, 0.0])
        part = comm.reduce_scatter(FakeCupyArray(torch.ones(2)))
        assert isinstance(part, FakeCupyArray) and part.tensor.tolist() == [2.0]

    run(body, 2)


def test_objects_of_other_modules_are_not_taken_for_cupy() -> None:
    for error in outcomes(lambda comm: comm.all_reduce(FakeCupyArray(torch.ones(1))), 2):
        assert type(error) is TypeError
        assert "not FakeCupyArray" in str(error)


def test_no_copy_of_a_dense_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        copies: list[int] = []
        monkeypatch.setattr("microddp.arrays.Operand.copy", lambda self: copies.append(1))
        x = torch.ones(8)
        address = x.data_ptr()
        comm.all_reduce(x)
        assert x.data_ptr() == address and not copies

    run(body, 1)


def test_numpy_and_torch_agree() -> None:
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))

    def body(comm: Communicator) -> None:
        mine = values[comm.rank].clone()
        array = mine.clone().numpy()
        comm.all_reduce(mine, algorithm="ring")
        comm.all_reduce(array, algorithm="ring")
        assert same_bits(mine, torch.from_numpy(array))

    run(body, 3)

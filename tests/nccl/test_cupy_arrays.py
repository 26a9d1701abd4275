"""CuPy arrays in and out of the NCCL transport, any dtype and layout, on CuPy's stream.

The arrays are real, their memory is the host's: what only a driver can do, DLPack above all, is not tried here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from microddp import Communicator
from tests.nccl.arrays_tools import LAYOUTS, CupyRuntime, NumPyArray, host_view
from tests.nccl.ranks_tools import quick_switches, with_comms
from tests.nccl.standin_arrays import as_cupy, as_tensor
from tests.nccl.standin_runtime import StandInRuntime
from tests.nccl.standin_tools import AtEnd

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

ALGORITHMS = ("ring", "direct", "tree", "naive", "full_ring")
REALS = "float16 float32 float64 complex64 complex128"
DTYPES = [np.dtype(name) for name in f"bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 {REALS}".split()]
GUARD = 0x5A
RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def played_fast() -> Iterator[None]:
    with quick_switches():
        yield


class Placed:
    """A CuPy array in memory whose other bytes are known.

    Attributes:
        array: CuPy's.
        values: the same memory as NumPy sees it.
    """

    def __init__(self, layout: str, dtype: Any) -> None:
        shape, self._view = LAYOUTS[layout]
        kind = np.dtype(dtype)
        self._raw: NumPyArray = np.full((int(np.prod(shape)), kind.itemsize), GUARD, np.uint8)
        whole: NumPyArray = self._raw.view(kind).reshape(shape)
        self.array: Any = self._view(as_cupy(torch.from_numpy(whole)))
        self.values: NumPyArray = self._view(whole)
        self._shape = shape

    def is_intact(self) -> bool:
        """Whether nothing but the array was written."""
        outside = np.ones(self._shape, bool)
        self._view(outside)[...] = False
        return bool((self._raw[outside.reshape(-1)] == GUARD).all())


def contribution(rank: int, shape: tuple[int, ...], dtype: Any) -> NumPyArray:
    """Small whole numbers, exact in any type; of complex numbers both parts."""
    numbers: NumPyArray = np.arange(int(np.prod(shape))).reshape(shape) % 5 + rank
    if np.dtype(dtype).kind == "c":
        numbers = numbers + 1j * (numbers % 3)
    elif np.dtype(dtype).kind == "b":
        numbers = numbers % 2
    found: NumPyArray = numbers.astype(dtype)
    return found


def total(shape: tuple[int, ...], dtype: Any, ranks: int = RANKS) -> NumPyArray:
    parts = np.stack([contribution(rank, shape, dtype) for rank in range(ranks)])
    found: Any = parts.any(axis=0) if np.dtype(dtype).kind == "b" else parts.sum(axis=0)
    return np.asarray(found, dtype)


def run(body: Any, world_size: int = RANKS, *, blocking: bool = True, **options: Any) -> list[Any]:
    make = partial(CupyRuntime, blocking=blocking)
    return list(with_comms(world_size, body, make_runtime=make, slice_nbytes=32, **options).checked())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce_in_place_and_out_of_place(layout: str) -> None:
    """Of every dtype; the result is in the caller's own array, and it is that which is returned."""

    def body(comm: Communicator) -> None:
        for number, dtype in enumerate(DTYPES):
            algorithm = ALGORITHMS[number % len(ALGORITHMS)]
            x, out = Placed(layout, dtype), Placed(layout, dtype)
            shape = x.array.shape
            mine, wanted = contribution(comm.rank, shape, dtype), total(shape, dtype)
            x.values[...] = mine
            result = comm.all_reduce(x.array, algorithm=algorithm, out=out.array)
            assert result is out.array
            np.testing.assert_array_equal(out.values, wanted, f"{dtype} {layout} by {algorithm}, out of place")
            np.testing.assert_array_equal(x.values, mine)
            work = comm.all_reduce(x.array, algorithm=algorithm, async_op=True)
            assert work.wait() is x.array
            np.testing.assert_array_equal(x.values, wanted, f"{dtype} {layout} by {algorithm}, in place")
            assert x.is_intact() and out.is_intact(), f"{dtype} {layout}: memory beside the array was written"

    run(body)


def test_other_layouts_for_the_result() -> None:
    def body(comm: Communicator) -> None:
        names = [name for name in LAYOUTS if LAYOUTS[name][1](np.empty(LAYOUTS[name][0])).shape == (4, 3)]
        assert len(names) > 3
        for first, second in zip(names, (*names[1:], names[0])):
            x, out = Placed(first, np.float32), Placed(second, np.float32)
            x.values[...] = contribution(comm.rank, (4, 3), np.float32)
            assert comm.all_reduce(x.array, out=out.array) is out.array
            np.testing.assert_array_equal(out.values, total((4, 3), np.float32), f"{first} to {second}")
            assert x.is_intact() and out.is_intact()

    run(body)


@pytest.mark.parametrize("layout", ["contiguous", "Fortran", "every other", "reversed, every other"])
def test_collectives_that_make_an_array_make_one_of_cupy(layout: str) -> None:
    import cupy

    def body(comm: Communicator) -> None:
        for dtype in DTYPES:
            x = Placed(layout, dtype)
            x.values[...] = mine = contribution(comm.rank, (4, 3), dtype)
            gathered = comm.all_gather(x.array)
            assert type(gathered) is cupy.ndarray and gathered.shape == (4 * RANKS, 3) and gathered.dtype == dtype
            wanted = [contribution(rank, (4, 3), dtype) for rank in range(RANKS)]
            np.testing.assert_array_equal(host_view(gathered), np.concatenate(wanted))
            np.testing.assert_array_equal(x.values, mine)
            large = as_cupy(torch.from_numpy(np.concatenate([mine] * RANKS)))
            part = comm.reduce_scatter(large)
            assert type(part) is cupy.ndarray and part.shape == (4, 3)
            np.testing.assert_array_equal(host_view(part), total((4, 3), dtype))

    run(body)


def test_results_into_arrays_of_the_caller() -> None:
    def body(comm: Communicator) -> None:
        x, out = Placed("reversed Fortran", np.int32), as_cupy(torch.zeros(4 * RANKS, 3, dtype=torch.int32))
        x.values[...] = contribution(comm.rank, (4, 3), np.int32)
        assert comm.all_gather(x.array, out=out[::-1]).data.ptr == out[::-1].data.ptr
        np.testing.assert_array_equal(host_view(out)[::-1][:4], contribution(0, (4, 3), np.int32))
        assert comm.broadcast(x.array, root=2) is x.array
        np.testing.assert_array_equal(x.values, contribution(2, (4, 3), np.int32))
        assert comm.reduce(x.array, root=1) is x.array
        wanted = contribution(2, (4, 3), np.int32) * (3 if comm.rank == 1 else 1)
        np.testing.assert_array_equal(x.values, wanted)
        assert x.is_intact()

    run(body)


def test_lanes() -> None:
    """A tuple of arrays comes back as the tuple that it is."""

    def body(comm: Communicator) -> None:
        values, indices = Placed("reversed", np.float32), Placed("column", np.int64)
        values.values[...] = (np.arange(12) * (comm.rank + 1)) % 7
        indices.values[...] = comm.rank
        pair = (values.array, indices.array)
        result = comm.all_reduce(pair, "argmax", algorithm="direct")
        assert result is pair
        each = np.stack([(np.arange(12) * (rank + 1)) % 7 for rank in range(RANKS)])
        np.testing.assert_array_equal(values.values, each.max(axis=0))
        np.testing.assert_array_equal(indices.values, each.argmax(axis=0))
        assert values.is_intact() and indices.is_intact()

    run(body)


def test_it_is_cupys_stream_that_is_waited_on_and_that_waits(gate: threading.Event) -> None:
    """The input becomes ready there late; the host does not wait, and what is enqueued there next sees the result.

    Of a contiguous array: what is copied before a collective is copied at once here, on a device in its stream.
    """

    def body(comm: Communicator) -> None:
        x = Placed("contiguous", np.float32)
        x.values[...] = 0
        comm.all_reduce(x.array)
        comm.synchronize()
        runtime: CupyRuntime = comm._transport.runtime  # type: ignore[attr-defined]
        seen: list[NumPyArray] = []
        stream = runtime.cupy_stream
        assert stream is not runtime.default

        def fill() -> None:
            assert gate.wait(20)
            x.values[...] = comm.rank + 1

        runtime.launch(stream, fill)
        result = comm.all_reduce(x.array)
        runtime.launch(stream, lambda: seen.append(x.values.copy()))
        assert result is x.array and not seen and not gate.is_set()
        all_here.wait(20)
        gate.set()
        runtime.synchronize()
        np.testing.assert_array_equal(seen[0], np.full((4, 3), 6))

    all_here = threading.Barrier(RANKS)
    run(body, blocking=False)


def test_a_type_that_torch_does_not_have_is_refused_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(runtime: CupyRuntime, array: Any) -> torch.Tensor:
        raise TypeError(f"unsupported dtype {array.dtype}")

    monkeypatch.setattr(CupyRuntime, "from_cupy", refuse)

    def body(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=f"rank {comm.rank} of 2.*x, a CuPy array of float32, cannot be taken over"):
            comm.all_reduce(as_cupy(torch.ones(3)))
        assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3

    run(body, 2)


def test_the_memory_of_an_array_is_kept_until_the_device_is_done(gate: threading.Event) -> None:
    """Also if nobody else keeps it."""

    def body(comm: Communicator) -> None:
        comm.all_reduce(as_cupy(torch.zeros(8)))
        comm.synchronize()
        runtime: CupyRuntime = comm._transport.runtime  # type: ignore[attr-defined]
        seen: list[list[float]] = []
        runtime.launch(runtime.cupy_stream, lambda: gate.wait(20))
        work = comm.all_reduce(as_cupy(torch.full((8,), comm.rank + 1.0)), async_op=True)
        runtime.launch(runtime.cupy_stream, lambda: None)
        ended = AtEnd(work.synchronize)
        all_here.wait(20)
        gate.set()
        assert ended.ended()
        seen.append(as_tensor(ended.result).tolist())
        assert seen == [[3.0] * 8]

    all_here = threading.Barrier(2)
    run(body, 2, blocking=False)


def test_without_cupy_streams_the_runtime_of_the_tests_would_be_wrong() -> None:
    """The two streams of ``CupyRuntime`` differ, or the tests above could not fail."""
    runtime = CupyRuntime(blocking=False)
    array = as_cupy(torch.ones(3))
    assert runtime.caller_stream(array) is runtime.cupy_stream is not runtime.caller_stream(torch.ones(3))
    assert runtime.caller_stream(array) is not StandInRuntime.caller_stream(runtime, array)
    runtime.close()

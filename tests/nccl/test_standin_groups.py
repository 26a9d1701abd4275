"""NCCL's groups on the streams of the stand-in's runtime: asynchronous, in issue order, captured; CuPy arrays."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.nccl.standin_arrays import as_cupy, as_tensor
from tests.nccl.standin_runtime import HOST, StandInRuntime
from tests.nccl.standin_tools import failing, num_descriptors, recorded, ring_step, run_ranks

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

AT_ONCE_S = 2.0
BLOCKED_S = 0.05  # what has not happened by then is taken to be blocked
INVALID_USAGE, REMOTE_ERROR = 5, 6


def test_many_groups_are_in_flight_while_the_host_goes_on(gate: threading.Event) -> None:
    """Rank 0's stream is held up: all ranks have enqueued 50 steps of a ring before the first of them moves."""
    world_size, num_steps = 3, 50
    all_enqueued = threading.Barrier(world_size, action=gate.set)

    def body(communicator: Any, rank: int) -> list[float]:
        runtime = StandInRuntime()
        groups, kernels = runtime.new_stream(), runtime.new_stream()
        held, arrived = torch.tensor([float(rank)]), torch.zeros(1)
        ring_step(communicator, rank, world_size, torch.zeros(1), torch.zeros(1))  # connects
        if rank == 0:
            runtime.launch(groups, gate.wait)
        for _ in range(num_steps):
            ring_step(communicator, rank, world_size, held, arrived, runtime.handle(groups))
            runtime.wait(kernels, recorded(runtime, groups))
            runtime.launch(kernels, lambda: torch.mul(arrived, 2, out=held))
            runtime.wait(groups, recorded(runtime, kernels))
        assert held.item() == rank
        all_enqueued.wait()
        runtime.synchronize()
        communicator.destroy()
        runtime.close()
        return held.tolist()

    expected = [[float((rank - num_steps) % world_size) * 2**num_steps] for rank in range(world_size)]
    assert run_ranks(world_size, body) == expected


def test_groups_of_a_communicator_run_in_issue_order_whatever_their_streams(gate: threading.Event) -> None:
    def body(communicator: Any, rank: int) -> list[float]:
        from cupy.cuda import nccl

        runtime = StandInRuntime()
        one, two = runtime.new_stream(), runtime.new_stream()
        values = torch.tensor([1.0, 2.0]) if rank == 0 else torch.zeros(2)
        call = communicator.send if rank == 0 else communicator.recv
        call(values.data_ptr(), 4, nccl.NCCL_UINT8, 1 - rank, 0)  # connects
        if rank == 0:
            runtime.launch(one, gate.wait)
        for index, stream in enumerate((one, two)):
            call(values[index:].data_ptr(), 4, nccl.NCCL_UINT8, 1 - rank, runtime.handle(stream))
        later = recorded(runtime, two)
        if rank == 0:
            assert not later.recording.wait(BLOCKED_S)  # the second is issued, its stream is idle, and it waits
            gate.set()
        runtime.synchronize()
        communicator.destroy()
        runtime.close()
        return values.tolist()

    assert run_ranks(2, body) == [[1.0, 2.0]] * 2


def test_captured_groups_are_replayed_and_mixed_with_others(standin: Any) -> None:
    """A ring step and a doubling, captured, launched and enqueued in turns: each is one step further."""
    world_size = 2

    def body(communicator: Any, rank: int) -> float:
        runtime = StandInRuntime()
        groups, kernels = runtime.new_stream(), runtime.new_stream()
        held, arrived = torch.tensor([1.0 + rank]), torch.zeros(1)
        ring_step(communicator, rank, world_size, torch.zeros(1), torch.zeros(1))

        def step() -> None:
            ring_step(communicator, rank, world_size, held, arrived, runtime.handle(groups))
            runtime.wait(kernels, recorded(runtime, groups))
            runtime.launch(kernels, lambda: torch.mul(arrived, 2, out=held))
            runtime.wait(groups, recorded(runtime, kernels))

        graph = runtime.capture(groups, step)
        for _ in range(3):
            graph.launch(groups)
            step()
        runtime.synchronize()
        graph.close()
        communicator.destroy()
        runtime.close()
        return held.item()

    misuses = standin.standin_misuses()
    assert run_ranks(world_size, body) == [64.0, 128.0]
    assert standin.standin_misuses() == misuses


def test_closing_a_communicator_before_its_graphs_is_counted(standin: Any, runtime: StandInRuntime) -> None:
    """NCCL would hang there. Here the peers learn of it, and what is replayed after it ends at once."""
    from cupy.cuda import nccl

    stream, memory, connected = runtime.new_stream(), torch.zeros(2), threading.Barrier(2)

    def body(communicator: Any, rank: int) -> Any:
        ring_step(communicator, rank, 2, memory[:1], memory[1:])
        connected.wait()
        arguments = (memory.data_ptr(), 4, nccl.NCCL_UINT8, 1 - rank)
        if rank == 1:
            return failing(lambda: communicator.recv(*arguments, 0))
        graph = runtime.capture(stream, lambda: communicator.send(*arguments, runtime.handle(stream)))
        communicator.abort()
        return graph

    misuses = standin.standin_misuses()
    graph, status = run_ranks(2, body)
    assert status == REMOTE_ERROR
    assert standin.standin_misuses() == misuses + 1
    graph.launch(HOST)
    graph.close()


@pytest.mark.parametrize("how", ["abort", "mismatch"])
def test_a_stream_goes_on_after_its_group_failed(how: str) -> None:
    """Rank 0 sends what nobody receives, until it aborts; or what is received at another size."""
    from cupy.cuda import nccl

    descriptors, ended = num_descriptors(), threading.Barrier(2)

    def body(communicator: Any, rank: int) -> None:
        runtime = StandInRuntime()
        stream = runtime.new_stream()
        memory = torch.ones(8)
        ring_step(communicator, rank, 2, memory, torch.zeros(8))
        call = communicator.send if rank == 0 else communicator.recv
        if rank == 0 or how == "mismatch":
            call(memory.data_ptr(), 8 + rank, nccl.NCCL_UINT8, 1 - rank, runtime.handle(stream))
        event = recorded(runtime, stream)
        if rank == 0 and how == "abort":
            assert not event.recording.wait(BLOCKED_S)
            communicator.check_async_error()
            communicator.abort()
        assert event.recording.wait(AT_ONCE_S)
        if how == "mismatch":
            assert failing(communicator.check_async_error) == INVALID_USAGE
        ended.wait()
        runtime.launch(stream, memory.zero_)
        runtime.close()
        assert memory.tolist() == [0.0] * 8 and not runtime.errors

    run_ranks(2, body)
    assert num_descriptors() == descriptors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.bool, torch.complex64], ids=str)
def test_cupy_arrays_and_tensors_share_memory_both_ways(dtype: torch.dtype) -> None:
    import cupy

    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for view in (tensor, tensor.permute(2, 0, 1)[1:], tensor[:, ::2, 1::2], tensor[0, 0, 0], tensor[:, :0]):
        array = as_cupy(view)
        assert isinstance(array, cupy.ndarray) and array.shape == tuple(view.shape)
        back = as_tensor(array)
        assert torch.equal(back, view)
        if view.numel():
            assert (array.data.ptr, back.data_ptr(), back.stride()) == (view.data_ptr(), view.data_ptr(), view.stride())
    part = as_tensor(as_cupy(tensor)[1:, ::2])
    part.fill_(1)
    assert torch.equal(tensor[1:, ::2], torch.ones(1, 2, 4, dtype=dtype))
    with pytest.raises(TypeError, match="bfloat16"):
        as_cupy(tensor.to(torch.bfloat16) if dtype != torch.complex64 else torch.zeros(1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="negative"):
        as_tensor(as_cupy(tensor)[:, ::-1])

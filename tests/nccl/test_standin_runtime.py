"""The device runtime over the stand-in: streams, events and captures as CUDA has them, and NCCL's groups on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.nccl.standin_arrays import as_cupy, as_tensor
from tests.nccl.standin_runtime import HOST, StandInRuntime
from tests.nccl.standin_tools import AtEnd, failing, num_descriptors, ring_step, run_ranks

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

AT_ONCE_S = 2.0
BLOCKED_S = 0.05  # what has not happened by then is taken to be blocked
INVALID_USAGE = 5


@pytest.fixture
def runtime() -> Iterator[StandInRuntime]:
    runtime = StandInRuntime()
    yield runtime
    runtime.close()
    assert not runtime.errors


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What holds a stream up until it is set."""
    gate = threading.Event()
    yield gate
    gate.set()


def recorded(runtime: StandInRuntime, stream: Any) -> Any:
    event = runtime.new_event()
    runtime.record(event, stream)
    return event


def test_a_stream_runs_in_order_and_two_only_by_events(runtime: StandInRuntime, gate: threading.Event) -> None:
    first, second = runtime.new_stream(), runtime.new_stream()
    log: list[str] = []
    runtime.launch(first, gate.wait)
    runtime.launch(first, lambda: log.append("first"))
    free = runtime.new_event()
    runtime.wait(second, free)  # never recorded: complete
    runtime.launch(second, lambda: log.append("before"))
    event = recorded(runtime, second)
    runtime.wait(HOST, event)
    assert log == ["before"] and runtime.query(event) and runtime.query(free)
    gated = recorded(runtime, first)
    runtime.wait(second, gated)
    runtime.launch(second, lambda: log.append("after"))
    end = recorded(runtime, second)
    assert not runtime.query(gated) and not runtime.query(end)
    gate.set()
    runtime.wait(HOST, end)
    assert log == ["before", "first", "after"]


def test_a_wait_is_for_the_recording_of_its_moment(runtime: StandInRuntime, gate: threading.Event) -> None:
    first, second = runtime.new_stream(), runtime.new_stream()
    event = recorded(runtime, first)
    runtime.wait(second, event)
    runtime.launch(first, gate.wait)
    runtime.record(event, first)  # again: what waited before is not concerned
    runtime.wait(HOST, recorded(runtime, second))
    assert not runtime.query(event)
    gate.set()
    runtime.wait(HOST, event)
    assert runtime.query(event)


def test_the_caller_works_on_the_host_or_on_the_stream_that_it_chose(runtime: StandInRuntime) -> None:
    stream, inner = runtime.new_stream(), runtime.new_stream()
    assert runtime.caller_stream() is HOST and runtime.query(recorded(runtime, HOST))
    with runtime.on(stream):
        assert runtime.caller_stream() is stream
        with runtime.on(inner):
            assert runtime.caller_stream() is inner
        other = AtEnd(runtime.caller_stream)
        assert other.ended() and other.result is HOST  # another thread's stream is its own
        assert runtime.caller_stream() is stream
    assert runtime.caller_stream() is HOST
    ran = []
    runtime.launch(HOST, lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]
    asynchronous = StandInRuntime(blocking=False)
    assert asynchronous.handle(asynchronous.caller_stream()) > runtime.handle(inner) > 0
    asynchronous.close()


def test_what_a_call_raises_is_kept_and_the_stream_goes_on() -> None:
    runtime = StandInRuntime()
    stream = runtime.new_stream()
    ran: list[bool] = []
    runtime.launch(stream, lambda: 1 // 0)
    with torch.no_grad():
        runtime.launch(stream, lambda: ran.append(torch.is_grad_enabled()))
    runtime.launch(stream, lambda: ran.append(torch.is_grad_enabled()))
    with pytest.raises(ZeroDivisionError):
        runtime.synchronize()
    assert ran == [False, True] and [type(each) for each in runtime.errors] == [ZeroDivisionError]
    runtime.failure = RuntimeError("sticky")
    with pytest.raises(RuntimeError, match="sticky"):
        runtime.query(runtime.new_event())
    runtime.close()


def test_closing_ends_the_threads_and_tells_of_a_stuck_stream(gate: threading.Event) -> None:
    threads = set(threading.enumerate())
    runtime = StandInRuntime()
    stream = runtime.new_stream()
    graph = runtime.capture(stream, lambda: runtime.launch(stream, lambda: None))
    assert len(set(threading.enumerate()) - threads) == 2
    runtime.launch(stream, gate.wait)
    with pytest.raises(TimeoutError, match=f"stream {stream.handle} .doing call"):
        runtime.synchronize(timeout=0.01)
    with pytest.raises(RuntimeError, match=f"still at work.*stream {stream.handle}"):
        runtime.close(timeout=0.01)
    with pytest.raises(RuntimeError, match="closed"):
        runtime.new_stream()
    gate.set()
    graph.close()
    stuck = set(threading.enumerate()) - threads
    for thread in stuck:
        thread.join(AT_ONCE_S)
    assert set(threading.enumerate()) == threads


# Captures.


def test_a_graph_replays_with_its_dependencies_between_the_launching_streams_work(runtime: StandInRuntime) -> None:
    """x ← 2x on one stream, y ← x + 1 on another, x ← y back on the first; a launch before and after."""
    one, two, launcher = runtime.new_stream(), runtime.new_stream(), runtime.new_stream()
    x, y = torch.tensor([3.0]), torch.zeros(1)

    def enqueue() -> None:
        assert runtime.caller_stream() is one and runtime.is_capturing(one) and not runtime.is_capturing(two)
        runtime.launch(one, lambda: x.mul_(2))
        runtime.wait(two, recorded(runtime, one))
        assert runtime.is_capturing(two)  # it has joined
        runtime.launch(two, lambda: torch.add(x, 1, out=y))
        runtime.wait(one, recorded(runtime, two))
        runtime.launch(one, lambda: x.copy_(y))

    graph = runtime.capture(one, enqueue)
    assert not runtime.is_capturing(one) and not runtime.is_capturing(two) and x.item() == 3
    expected = 5.0
    for _ in range(20):
        expected = 2 * expected + 1
    runtime.launch(launcher, lambda: x.fill_(5))
    for _ in range(20):
        graph.launch(launcher)
    seen: list[float] = []
    runtime.launch(launcher, lambda: seen.append(x.item()))
    runtime.synchronize()
    assert seen == [expected]
    graph.launch(HOST)  # returns when it has run
    assert x.item() == 2 * expected + 1
    graph.close()
    graph.close()
    with pytest.raises(RuntimeError, match="closed"):
        graph.launch(launcher)


def test_a_graph_is_ordered_with_no_stream_but_the_one_that_launches_it(
    runtime: StandInRuntime, gate: threading.Event
) -> None:
    captured, launcher = runtime.new_stream(), runtime.new_stream()
    ran: list[int] = []
    graph = runtime.capture(captured, lambda: runtime.launch(captured, lambda: ran.append(1)))
    runtime.launch(captured, gate.wait)  # the stream it was captured on is busy with something else
    graph.launch(launcher)
    runtime.wait(HOST, recorded(runtime, launcher))
    assert ran == [1]


Mistake = Callable[[StandInRuntime, Any, Any], object]
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "wait for an event from outside": (
        "outside the capture",
        lambda runtime, one, two: runtime.wait(one, recorded(runtime, two)),
    ),
    "wait for the host": ("outside the capture", lambda runtime, one, _: runtime.wait(one, recorded(runtime, HOST))),
    "query": ("cannot be queried", lambda runtime, one, _: runtime.query(recorded(runtime, one))),
    "block the host": ("the host cannot wait", lambda runtime, one, _: runtime.wait(HOST, recorded(runtime, one))),
    "capture twice": ("already", lambda runtime, one, _: runtime.capture(one, lambda: None)),
    "not joined": ("not joined to stream", lambda runtime, one, two: fork(runtime, one, two)),
}


def fork(runtime: StandInRuntime, one: Any, two: Any) -> None:
    runtime.wait(two, recorded(runtime, one))
    runtime.launch(two, lambda: None)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cuda_refuses_in_a_capture_is_refused(name: str, runtime: StandInRuntime) -> None:
    text, mistake = MISTAKES[name]
    one, two = runtime.new_stream(), runtime.new_stream()
    with pytest.raises(RuntimeError, match=text):
        runtime.capture(one, lambda: mistake(runtime, one, two))
    assert not runtime.is_capturing(one) and not runtime.is_capturing(two)
    kept = runtime.new_event()
    runtime.capture(one, lambda: runtime.record(kept, one)).close()
    with pytest.raises(RuntimeError, match="has ended"):
        runtime.wait(two, kept)
    with pytest.raises(RuntimeError, match="the host cannot be captured"):
        runtime.capture(HOST, lambda: None)


# NCCL's groups on streams.


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
    """NCCL would hang there. What is replayed after it ends at once."""
    stream, memory = runtime.new_stream(), torch.zeros(1)

    def body(communicator: Any, rank: int) -> Any:
        return runtime.capture(stream, lambda: ring_step(communicator, rank, 1, memory, memory, runtime.handle(stream)))

    misuses = standin.standin_misuses()
    graph = run_ranks(1, body)[0]
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


# CuPy arrays.


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

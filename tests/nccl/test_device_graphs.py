"""Collectives captured into graphs, by the library and by its users, over the stand-in's streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from microddp.errors import ClosedError, TransportError
from tests.matrix import ROWS
from tests.nccl.device_tools import Device, on_devices
from tests.nccl.injected_tools import Failing, Recorders, labelled_transfers

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

NUMEL = 40


def total(world_size: int, factor: float = 1.0, numel: int = NUMEL) -> list[float]:
    return [factor * sum(range(1, world_size + 1))] * numel


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_replays_take_what_the_tensor_holds_then(row: str, world_size: int) -> None:
    """No replay calls NCCL, or waits on the host; capturing changes nothing."""
    recorders = Recorders(world_size)

    def body(device: Device) -> None:
        x = torch.full((NUMEL,), 7.0)
        graph = device.comm.capture_all_reduce(x, algorithm=ROWS[row].algorithm, order=ROWS[row].order)
        assert graph.result is x and x.tolist() == [7.0] * NUMEL
        calls = len(recorders.each[device.rank].program)
        device.meet()
        found = []
        with device.held() as gate:
            for factor in range(1, 6):
                device.fill(x, (device.rank + 1.0) * factor)
                assert graph.replay() is x
                found.append(device.look(x))
            device.meet()
            assert not gate.is_set() and not any(found)
        device.comm.synchronize()
        device.finish()
        assert [each.tolist() for (each,) in found] == [total(world_size, factor) for factor in range(1, 6)]
        assert len(recorders.each[device.rank].program) == calls

    with labelled_transfers():
        on_devices(world_size, body, make_api=recorders.api)
    assert recorders.verdict().problems == ()


def test_two_graphs_and_eager_calls_between_them_on_other_streams() -> None:
    """All use the same two streams and, but for the graphs, the same staging."""

    def body(device: Device) -> None:
        runtime, comm = device.runtime, device.comm
        tensors = [torch.zeros(NUMEL) for _ in range(3)]
        first = comm.capture_all_reduce(tensors[0], algorithm="direct")
        second = comm.capture_all_reduce(tensors[1], algorithm="ring")
        streams = [runtime.new_stream() for _ in range(3)]
        calls: list[Callable[[], Any]] = [
            first.replay,
            second.replay,
            lambda: comm.all_reduce(tensors[2], algorithm="ring"),
        ]
        found = []
        for turn in range(12):
            place = (turn * 2 + turn // 3) % 3
            stream = streams[(turn + turn // 4) % 3]
            # The tensor was last used on another stream: that is the caller's to order.
            for other in streams:
                event = runtime.new_event()
                runtime.record(event, other)
                runtime.wait(stream, event)
            device.fill(tensors[place], (device.rank + 1.0) * (turn + 1), stream)
            with runtime.on(stream):
                calls[place]()
            found.append(device.look(tensors[place], stream))
        comm.synchronize()
        device.finish()
        assert [each.tolist() for (each,) in found] == [total(3, turn + 1.0) for turn in range(12)]

    on_devices(3, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_follow_eager_calls_of_other_streams_that_are_still_pending(world_size: int) -> None:
    """The replay starts after the call before it, whoever is held up, and the call after it after that."""

    def body(device: Device) -> None:
        runtime, comm = device.runtime, device.comm
        x, y, other = (torch.full((NUMEL,), device.rank + 1.0) for _ in range(3))
        graph = comm.capture_all_reduce(x, algorithm="ring")
        comm.all_reduce(other.clone(), algorithm="ring")
        held = runtime.new_stream()
        device.meet()
        with device.held(held):
            with runtime.on(held):
                eager = comm.all_reduce(other, algorithm="ring", async_op=True)
            graph.replay()
            found = device.look(x)
            with runtime.on(runtime.new_stream()):
                after = comm.all_reduce(y, algorithm="ring", async_op=True)
            with pytest.raises(TimeoutError):
                after.synchronize(0.05)
            assert not found and not eager.done() and not after.done()
            device.meet()
        comm.synchronize()
        device.finish()
        assert other.tolist() == found[0].tolist() == y.tolist() == total(world_size)

    on_devices(world_size, body)


def test_several_calls_in_a_capture_of_the_users() -> None:
    """With kernels of the user's before, between and after."""

    def body(device: Device) -> None:
        runtime, comm = device.runtime, device.comm
        x, y = torch.zeros(NUMEL), torch.zeros(17, dtype=torch.float64)
        comm.all_reduce(x, algorithm="ring"), comm.all_reduce(y, "max", algorithm="tree")
        comm.synchronize()
        stream = runtime.new_stream()

        def enqueue() -> None:
            runtime.launch(stream, lambda: x.mul_(2))
            comm.all_reduce(x, algorithm="ring")
            runtime.launch(stream, lambda: y.add_(x[0].item()))
            work = comm.all_reduce(y, "max", algorithm="tree", async_op=True)
            work.wait()
            runtime.launch(stream, lambda: x.add_(1))

        graph = runtime.capture(stream, enqueue)
        assert x.tolist() == [0.0] * NUMEL and not runtime.is_capturing(stream)
        found = []
        for factor in range(1, 5):
            device.fill(x, (device.rank + 1.0) * factor, stream)
            device.fill(y, float(device.rank), stream)
            graph.launch(stream)
            found.append((device.look(x, stream), device.look(y, stream)))
        device.finish()
        for factor, ((in_x,), (in_y,)) in enumerate(found, start=1):
            assert in_x.tolist() == [each + 1 for each in total(3, 2.0 * factor)]
            assert in_y.tolist() == [total(3, 2.0 * factor)[0] + 2] * 17
        eager = torch.full((NUMEL,), 1.0)
        comm.all_reduce(eager)
        comm.synchronize()
        assert eager.tolist() == [3.0] * NUMEL
        graph.close()

    on_devices(3, body)


def test_a_call_that_has_not_run_cannot_be_captured() -> None:
    """Ranks may not be connected, nor have agreed on it: a clear error, and everything else goes on."""

    def body(device: Device) -> None:
        stream = device.runtime.new_stream()
        device.comm.all_reduce(torch.zeros(NUMEL), algorithm="ring")
        text = r"all_reduce of float32\[40\] by direct is captured before it has run: call it once, on all ranks"
        with pytest.raises(TransportError, match=f"rank {device.rank} of 2.*{text}"):
            device.runtime.capture(stream, lambda: device.comm.all_reduce(torch.zeros(NUMEL), algorithm="direct"))
        assert not device.runtime.is_capturing(stream)
        x = torch.full((NUMEL,), 1.0)
        device.comm.all_reduce(x, algorithm="ring")
        device.comm.synchronize()
        assert x.tolist() == [2.0] * NUMEL

    on_devices(2, body)


def test_refused_arguments_leave_a_capture_and_the_communicator_usable() -> None:
    def body(device: Device) -> None:
        runtime, comm = device.runtime, device.comm
        x, stream = torch.zeros(NUMEL), runtime.new_stream()
        comm.all_reduce(x, algorithm="ring")
        comm.synchronize()  # x is filled on another stream below
        for call in (lambda: comm.capture_all_reduce(x, "nonsense"), lambda: comm.capture_all_reduce([1.0])):
            with pytest.raises((ValueError, TypeError), match=f"rank {device.rank} of 2"):
                call()

        def enqueue() -> None:
            with pytest.raises(ValueError, match="unknown algorithm"):
                comm.all_reduce(x, algorithm="nonsense")
            comm.all_reduce(x, algorithm="ring")

        graph = runtime.capture(stream, enqueue)
        device.fill(x, device.rank + 1.0, stream)
        graph.launch(stream)
        found = device.look(x, stream)
        device.finish()
        assert found[0].tolist() == total(2)

    on_devices(2, body)


def test_a_failure_within_a_capture_closes_all_ranks_clearly() -> None:
    """Rank 1's first send of the capture fails. The capture ends; no rank hangs."""
    recorders = Recorders(
        3, lambda recorder, rank: Failing(recorder, 0, lambda: KeyError(7)) if rank == 1 else recorder
    )

    def body(device: Device) -> str:
        comm = device.comm
        x = torch.full((NUMEL,), device.rank + 1.0)
        comm.all_reduce(x.clone(), algorithm="ring")
        comm.synchronize()
        device.meet()
        recorders.arm(device.rank)
        device.meet()
        stream = device.runtime.new_stream()
        text = ""
        try:
            graph = device.runtime.capture(stream, lambda: comm.all_reduce(x, algorithm="ring"))
            device.meet()
            comm.all_reduce(x, algorithm="ring")
            comm.synchronize()
            graph.close()
        except (TransportError, ClosedError) as error:
            text = f"{type(error).__name__}: {error}"
            if device.rank == 1:
                device.meet()
        assert not device.runtime.is_capturing(stream)
        with pytest.raises(ClosedError, match="NCCL result 7: an operation is still in progress"):
            comm.all_reduce(x, algorithm="ring")
        assert device.rank != 1 or x.tolist() == [2.0] * NUMEL  # the others' calls after it have failed in flight
        return text

    with labelled_transfers():
        ranks = on_devices(3, body, make_api=recorders.api)
    assert all("NCCL result 7" in text and "rank 1" in text for text in ranks.results), ranks.results
    assert ranks.seconds < 5


def test_graphs_end_with_their_communicator_and_before_it() -> None:
    def body(device: Device) -> None:
        comm = device.comm
        tensors = [torch.full((NUMEL,), device.rank + 1.0) for _ in range(3)]
        graphs = [comm.capture_all_reduce(x, algorithm="ring") for x in tensors]
        graphs[0].replay()
        comm.synchronize()
        graphs[0].close()
        graphs[0].close()
        with pytest.raises(ClosedError, match="this graph was closed"):
            graphs[0].replay()
        assert tensors[0].tolist() == total(2)
        graphs[1].replay()  # the communicator and other graphs go on
        del graphs[1]  # in flight: its memory must live
        comm.all_reduce(tensors[0], algorithm="ring")
        comm.synchronize()
        assert tensors[1].tolist() == total(2) and tensors[0].tolist() == total(2, 2.0)
        device.meet()
        comm.close()
        with pytest.raises(ClosedError):
            graphs[-1].replay()

    on_devices(2, body)


def test_a_replay_after_a_failure_says_why() -> None:
    def body(device: Device) -> None:
        comm = device.comm
        graph = comm.capture_all_reduce(torch.zeros(NUMEL), algorithm="ring")
        device.meet()
        if device.rank == 1:
            comm._calls.abort(RuntimeError("enough"))
        else:
            with pytest.raises((ClosedError, TransportError), match="rank 1 raised RuntimeError: enough"):
                wait_for_failure(device)
        with pytest.raises((ClosedError, TransportError), match="enough"):
            graph.replay()

    on_devices(2, body)


def wait_for_failure(device: Device) -> None:
    device.comm.all_reduce(torch.zeros(NUMEL), algorithm="ring")
    device.comm.synchronize()


def test_a_graph_needs_a_transport_of_streams() -> None:
    import microddp

    def body(comm: microddp.Communicator) -> None:
        with pytest.raises(ValueError, match="the thread transport has no graphs to capture into"):
            comm.capture_all_reduce(torch.zeros(3))

    microddp.run_threads(body, 2)

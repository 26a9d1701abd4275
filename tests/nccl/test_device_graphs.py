"""Collectives captured into graphs, by the library and by its users, over the stand-in's streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from microddp.errors import ClosedError
from microddp.tracing import record
from tests.matrix import ROWS
from tests.nccl.device_tools import NUMEL, Device, on_devices, total
from tests.nccl.injected_tools import Recorders, labelled_transfers

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]


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
        captured = replace(device.comm.counters)  # of the run before the capture
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
        counted = asdict(device.comm.counters)
        assert counted == {name: 6 * count for name, count in asdict(captured).items()}
        assert counted["collectives"] == 6 and (counted["bytes_sent"] > 0 or world_size == 1)

    with labelled_transfers():
        on_devices(world_size, body, make_api=recorders.api)
    assert recorders.verdict().problems == ()


def test_a_replay_is_one_range_of_a_profiler() -> None:
    def body(device: Device) -> None:
        x = torch.full((NUMEL,), 1.0)
        graph = device.comm.capture_all_reduce(x, algorithm="ring")
        device.comm.synchronize()
        device.meet()
        with record() as recorder:
            device.meet()
            graph.replay()
            device.meet()
        names = [each.name for each in recorder.ranges if each.rank == device.rank]
        assert names == ["microddp/all_reduce ring n=2 160B fp32"]

    on_devices(2, body)


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

"""Collectives on a device whose streams are asynchronous: the host never waits, streams wait for what they must."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.matrix import ROWS
from tests.nccl.device_tools import NUMEL, Device, on_devices, total
from tests.nccl.standin_runtime import HOST
from tests.nccl.standin_tools import AtEnd, recorded

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

SOON_S = 0.05


def warm(device: Device, *calls: tuple[str | None, str | None], numel: int = NUMEL) -> None:
    """The first call of a kind may block: ranks agree on it, and connect."""
    for algorithm, order in calls or ((None, None),):
        device.comm.all_reduce(torch.zeros(numel), algorithm=algorithm, order=order)
    device.comm.synchronize()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_host_never_waits_for_the_device(world_size: int) -> None:
    """One call by each algorithm, all in flight at once behind a kernel that waits for the host."""

    def body(device: Device) -> None:
        rows = [(row.algorithm, row.order) for row in ROWS.values()]
        warm(device, *rows)
        tensors = [torch.empty(NUMEL) for _ in rows]
        device.meet()
        with device.held() as gate:
            for x in tensors:
                device.fill(x, device.rank + 1.0)
            for x, (algorithm, order) in zip(tensors, rows):
                assert device.comm.all_reduce(x, algorithm=algorithm, order=order) is x
            found = [device.look(x) for x in tensors]
            device.meet()  # all ranks have come back from all calls
            assert not gate.is_set() and not any(found)
        device.finish()
        assert [each.tolist() for (each,) in found] == [total(world_size)] * len(rows)

    on_devices(world_size, body)


def test_wait_makes_the_stream_wait_and_synchronize_the_host() -> None:
    def body(device: Device) -> None:
        warm(device)
        x, free, side = (
            torch.full((NUMEL,), device.rank + 1.0),
            device.runtime.new_stream(),
            device.runtime.new_stream(),
        )
        device.meet()
        with device.held():
            work = device.comm.all_reduce(x, async_op=True)
            before = device.look(x, free)
            assert work.wait() is x and not work.done() and "pending" in repr(work)
            with device.runtime.on(side):
                assert work.wait() is x
            on_side, on_own = device.look(x, side), device.look(x)
            begun = time.monotonic()
            for blocked in (work.synchronize, work.wait, device.comm.synchronize):
                with pytest.raises(TimeoutError, match=r"0\.05 s; (it goes|they go) on"):
                    blocked(SOON_S)
            assert time.monotonic() - begun >= 3 * SOON_S
            device.runtime.wait(HOST, recorded(device.runtime, free))
            assert before[0].tolist() == [device.rank + 1.0] * NUMEL  # nobody made that stream wait
            assert not on_side and not on_own
            device.meet()
        assert work.synchronize(20) is x and work.done() and work.wait() is x and "ended" in repr(work)
        assert x.tolist() == total(3)
        device.finish()
        assert on_side[0].tolist() == on_own[0].tolist() == total(3)

    on_devices(3, body)


def test_the_callers_stream_counts_and_a_third_one_may_use_the_result() -> None:
    """The tensor becomes ready on a side stream, late; all others are busy with something else, or idle."""

    def body(device: Device) -> None:
        warm(device)
        runtime, found = device.runtime, []
        producer, consumer = runtime.new_stream(), runtime.new_stream()
        x = torch.zeros(NUMEL)
        device.meet()
        for repeat in range(20):
            with device.held(), device.held(producer) as gate:
                device.fill(x, (device.rank + 1.0) * (repeat + 1), producer)
                with runtime.on(producer):
                    work = device.comm.all_reduce(x, async_op=True)
                with runtime.on(consumer):
                    work.wait()
                found.append(device.look(x, consumer))
                gate.set()
                work.synchronize(20)  # though the default stream is held
                runtime.wait(producer, recorded(runtime, consumer))  # which still reads what is filled next
        device.finish()
        assert [each.tolist() for (each,) in found] == [total(2, factor=repeat + 1.0) for repeat in range(20)]

    on_devices(2, body)


def test_without_wait_the_callers_stream_does_not_wait_for_an_asynchronous_call() -> None:
    """And with one that is not asynchronous it does."""

    def body(device: Device) -> None:
        warm(device)
        x, other = torch.full((NUMEL,), device.rank + 1.0), device.runtime.new_stream()
        device.meet()
        with device.held(other) as gate:
            with device.runtime.on(other):
                work = device.comm.all_reduce(x, async_op=True)  # after what is on that stream
            early = device.look(x)
            device.runtime.wait(HOST, recorded(device.runtime, device.stream))
            assert early[0].tolist() == [device.rank + 1.0] * NUMEL
            work.wait()
            late = device.look(x)
            assert not late and not gate.is_set()
        device.finish()
        assert late[0].tolist() == total(2)

    on_devices(2, body)


def test_works_end_in_the_order_of_the_calls_whatever_their_streams() -> None:
    def body(device: Device) -> None:
        warm(device)
        runtime = device.runtime
        first, second = torch.full((NUMEL,), device.rank + 1.0), torch.full((NUMEL,), device.rank + 1.0)
        held, free = runtime.new_stream(), runtime.new_stream()
        device.meet()
        with device.held(held):
            with runtime.on(held):
                works = [device.comm.all_reduce(first, async_op=True)]
            with runtime.on(free):
                works.append(device.comm.all_reduce(second, async_op=True))
            with pytest.raises(TimeoutError):
                works[1].synchronize(SOON_S)  # behind the first, though its own stream is idle
            assert device.is_idle(free) or not works[1].done()
            device.meet()
        works[1].synchronize(20)
        assert works[0].done() and first.tolist() == second.tolist() == total(2)

    on_devices(2, body)


@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_a_temporary_lives_until_the_device_is_done_with_it_and_no_longer(layout: str) -> None:
    """Its memory, that is: NumPy's, so that it can be seen when it is given up."""

    def temporary(device: Device) -> weakref.ref[object]:
        memory = np.full((NUMEL, 2), device.rank + 1.0, np.float32)
        x = torch.from_numpy(memory)[:, 0] if layout == "strided" else torch.from_numpy(memory.reshape(-1)[:NUMEL])
        device.comm.all_reduce(x, async_op=True)  # the work is dropped too
        # What is enqueued here keeps its tensors; on a device only the flight does.
        assert keeps(device.comm._transport.watchdog.pending()[-1], x)  # type: ignore[attr-defined]
        return weakref.ref(memory)

    def body(device: Device) -> None:
        warm(device)
        device.meet()
        with device.held():
            memories = [temporary(device) for _ in range(3)]
            gc.collect()
            rubbish = [torch.full((NUMEL,), -1.0) for _ in range(100)]
            kept = [memory() for memory in memories]
            assert all(each is not None for each in kept)
            device.comm.all_reduce(torch.empty(0), async_op=True)
            device.meet()
        device.comm.synchronize()
        for each in kept:
            assert np.asarray(each).reshape(-1)[:: 2 if layout == "strided" else 1][:NUMEL].tolist() == total(2)
        del rubbish, kept, each
        deadline = time.monotonic() + 5
        while any(memory() is not None for memory in memories):
            assert time.monotonic() < deadline, "the memory is kept"
            gc.collect()
            time.sleep(0.01)

    on_devices(2, body)


def keeps(flight: object, x: torch.Tensor) -> bool:
    """Whether a flight holds a tensor on the memory of ``x``."""
    seen, ahead = set[int](), [flight._kept]  # type: ignore[attr-defined]
    while ahead:
        each = ahead.pop()
        if isinstance(each, torch.Tensor):
            if each.data_ptr() == x.data_ptr():
                return True
        elif id(each) not in seen and not isinstance(each, (type, ModuleType)):
            seen.add(id(each))
            held = gc.get_referents(each)
            ahead += [one for one in held if one is not getattr(each, "__globals__", None)]
    return False


def test_a_barrier_waits_on_the_host_for_what_every_rank_has_enqueued() -> None:
    def body(device: Device) -> None:
        warm(device)
        x = torch.full((NUMEL,), device.rank + 1.0)
        device.meet()
        with device.held() as gate:
            device.comm.all_reduce(x)
            barrier = AtEnd(device.comm.barrier)
            assert not barrier.ended(SOON_S)
            device.meet()
            if device.rank == 0:
                gate.set()
                assert not barrier.ended(SOON_S)  # rank 1 is still held up
            device.meet()
        assert barrier.ended() and barrier.error is None
        assert x.tolist() == total(2)  # so the host may look

    on_devices(2, body)


def test_threads_of_one_rank_and_its_streams() -> None:
    """Calls from another thread go to that thread's stream: the default, if it has chosen none."""

    def body(device: Device) -> None:
        warm(device)
        x = torch.zeros(NUMEL)
        device.meet()
        with device.held():
            device.fill(x, device.rank + 1.0)
            call = AtEnd(lambda: device.comm.all_reduce(x))
            assert call.ended() and call.error is None and call.result is x
            found = device.look(x)
            assert not found
        device.finish()
        assert found[0].tolist() == total(2)
        assert not [each for each in threading.enumerate() if each.name.startswith("microddp-worker")]

    on_devices(2, body)

"""The device runtime over the stand-in: streams, events and captures as CUDA has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.nccl.standin_runtime import HOST, StandInRuntime
from tests.nccl.standin_tools import AtEnd, recorded

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

AT_ONCE_S = 2.0


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

"""Tracing: ranges that nest on every thread, heard by whoever listens, and nothing at all when nobody does."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # not in its __all__
from torch.profiler import ProfilerActivity, profile

import microddp
from microddp import tracing, tracing_sinks
from microddp.communicator import Communicator
from microddp.tracing_sinks import find_nvtx, nvtx_is_wanted
from microddp.transport.gloo import GlooTransport
from microddp.transport.thread import run_thread_ranks
from tests.tracing_tools import StrictSink, reduce_all

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[1]


def listen(monkeypatch: pytest.MonkeyPatch) -> StrictSink:
    """A sink that hears everything from now on."""
    sink = StrictSink()
    monkeypatch.setattr(tracing, "current", lambda: tracing.Tracer([sink]))
    return sink


# Ranges


def test_nothing_is_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("something was traced")

    monkeypatch.setattr(tracing.Tracer, "__init__", refuse)
    monkeypatch.setattr(tracing, "_names", refuse)
    asked: list[int] = []
    quiet = tracing.current

    def ask() -> tracing.Tracer | None:
        asked.append(threading.get_ident())
        return quiet()

    monkeypatch.setattr(tracing, "current", ask)
    run_thread_ranks(lambda each: reduce_all(each, num_calls=3), 2)
    assert len(asked) == 2 * 3  # once for each collective of each rank


def test_a_recorder_is_heard_within_its_block_only() -> None:
    assert tracing.current() is None
    with tracing.record() as outer:
        with tracing.record() as inner:
            run_thread_ranks(reduce_all, 2)
        num_ranges = len(inner.ranges)
        assert num_ranges > 0
        run_thread_ranks(reduce_all, 2)
        assert (len(inner.ranges), len(outer.ranges)) == (num_ranges, 2 * num_ranges)
    assert tracing.current() is None
    run_thread_ranks(reduce_all, 2)
    assert len(outer.ranges) == 2 * num_ranges


@pytest.mark.parametrize("is_async", [False, True])
def test_ranges_nest_on_every_thread(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    sink = listen(monkeypatch)

    def body(comm: Communicator) -> None:
        tensors = [torch.ones(4096) for _ in range(3)]
        works = [comm.all_reduce(each, algorithm="ring", async_op=True) for each in tensors] if is_async else []
        for work in works:
            work.wait()
        for each in tensors if not is_async else []:
            comm.all_reduce(each, algorithm="ring")

    microddp.run_threads(body, 3)
    sink.check()
    wholes = "microddp/all_reduce ring n=3 16KiB fp32"
    outer = {thread: [name for depth, name in found if depth == 0] for thread, found in sink.names.items()}
    assert list(outer.values()) == [[wholes] * 3] * 3
    assert all((depth == 0) == (name == wholes) for found in sink.names.values() for depth, name in found)
    inner = {name.split(" ")[0] for found in sink.names.values() for depth, name in found if depth}
    assert inner == {"scatter-reduce", "all-gather", "wait", "combine"}


def test_what_hears_of_a_range_last_hears_of_its_end_first() -> None:
    log: list[str] = []

    class Sink(tracing_sinks.Sink):
        def __init__(self, name: str) -> None:
            self.name = name

        def push(self, name: str) -> None:
            log.append(f"{self.name} begins {name}")

        def pop(self, token: None) -> None:
            log.append(f"{self.name} ends")

    with tracing.Tracer([Sink("first"), Sink("second")]).range("x", rank=0):
        pass
    assert log == ["first begins x", "second begins x", "second ends", "first ends"]


def test_ranges_end_when_the_collective_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = listen(monkeypatch)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            raise RuntimeError("left")
        comm.all_reduce(torch.ones(64), algorithm="ring")

    with pytest.raises(RuntimeError, match="left"):
        microddp.run_threads(body, 3)
    sink.check()
    assert any(depth == 0 for found in sink.names.values() for depth, _ in found)


def test_torch_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> list[str]:
        def reduce() -> None:
            comm.all_reduce(torch.ones(1024), algorithm="ring")

        if comm.rank:
            reduce()
            reduce()
            return []
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            reduce()
        assert tracing.current() is None
        reduce()  # is not to be heard
        return [each.name for each in profiled.events()]

    found, _ = microddp.run_threads(body, 2)
    assert found.count("microddp/all_reduce ring n=2 4KiB fp32") == 1
    assert found.count("scatter-reduce step 1/1 slice 1/1 send→1 recv-combine←1") == 1
    assert found.count("all-gather step 1/1 slice 1/1 send→1") == 1


def test_ranges_nest_where_gloo_plays_on_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, store = listen(monkeypatch), HashStore()

    def body(rank: int) -> None:
        with Communicator(GlooTransport(store, rank, 2, timeout=20, address="127.0.0.1")) as comm:
            comm.all_reduce(torch.ones(1 << 16), algorithm="ring")

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(body, rank) for rank in range(2)]:
            each.result(timeout=30)
    sink.check()
    whole = "microddp/all_reduce ring n=2 256KiB fp32"
    played = [[name for _, name in found] for found in sink.names.values() if (0, whole) not in found]
    assert [(0, whole)] * 2 == [each for found in sink.names.values() for each in found if each[1] == whole]
    assert len(played) == 2  # the waiters of both ranks
    for found in played:
        assert found.count("combine sum") == 1
        assert found[-1] == "wait for the rest"


# Who listens


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, False),
        ({"MICRODDP_NVTX": "1"}, True),
        ({"MICRODDP_NVTX": "0", "NSYS_PROFILING_SESSION_ID": "7"}, False),
        ({"MICRODDP_NVTX": ""}, False),
        ({"MICRODDP_NVTX": "yes"}, False),
        ({"MICRODDP_NVTX": "yes", "NSYS_PROFILING_SESSION_ID": "7"}, True),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, True),
        ({"NVTX_INJECTION64_PATH": "/opt/nsight/libToolsInjection64.so"}, True),
        ({"NVTX_INJECTION64_PATH": "/usr/local/cuda/lib64/libcupti.so.13"}, False),
        ({"NVTX_INJECTION64_PATH": ""}, False),
    ],
)
def test_when_nvtx_is_wanted(variables: dict[str, str], is_wanted: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "microddp"):
        assert nvtx_is_wanted(variables) is is_wanted
    assert ("'yes' is neither 0 nor 1" in caplog.text) is (variables.get("MICRODDP_NVTX") == "yes")


def test_nvtx_by_torch_else_by_cupy_else_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def fake(available: bool) -> types.ModuleType:
        package, module = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
        nvtx = types.SimpleNamespace(available=available, RangePush=heard.append, RangePop=lambda: heard.append("pop"))
        setattr(module, "nvtx", nvtx)  # noqa: B010 - a module has no such attribute that mypy knows of
        setattr(package, "cuda", module)  # noqa: B010
        monkeypatch.setitem(sys.modules, "cupy", package)
        monkeypatch.setitem(sys.modules, "cupy.cuda", module)
        return package

    def not_built(message: str) -> NoReturn:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", not_built)
    fake(available=True)
    sink = find_nvtx()
    assert isinstance(sink, tracing_sinks.NvtxSink)
    sink.push("by CuPy")
    sink.pop(None)
    assert heard == ["by CuPy", "pop"]
    with caplog.at_level(logging.WARNING, "microddp"):
        fake(available=False)
        assert find_nvtx() is None
        monkeypatch.setitem(sys.modules, "cupy.cuda", None)
        assert find_nvtx() is None
    assert caplog.text.count("no NVTX ranges: NVTX functions not installed") == 2
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda message: None)
    assert isinstance(find_nvtx(), tracing_sinks.NvtxSink)


NVTX_PROGRAM = """
import torch
heard = []
torch.cuda.nvtx.mark = lambda message: None
torch.cuda.nvtx.range_push = heard.append
torch.cuda.nvtx.range_pop = lambda: heard.append("pop")
import microddp
microddp.run_threads(lambda comm: comm.all_reduce(torch.ones(1), algorithm="naive"), 1)
print(heard)
"""


def test_the_variable_turns_nvtx_on() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MICRODDP_NVTX": "1"}
    done = subprocess.run([sys.executable, "-c", NVTX_PROGRAM], env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout == "['microddp/all_reduce naive n=1 4B fp32', 'wait for the rest', 'pop', 'pop']\n", done.stderr

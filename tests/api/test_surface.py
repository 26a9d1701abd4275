"""What the package offers, under which names, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import microddp
import microddp.schedule
from microddp.schedule import Step, find_algorithm, ring
from tests.api.tools import outcomes, run

pytestmark = pytest.mark.timeout(110)

ROOT = Path(__file__).parents[2]

EXPORTED = [
    "Choice",
    "ClosedError",
    "CollectiveTimeoutError",
    "Communicator",
    "Counters",
    "Lane",
    "MicroddpError",
    "MismatchError",
    "PlanError",
    "ReduceOp",
    "RemoteError",
    "ScheduleError",
    "TransportError",
    "Work",
    "algorithm",
    "algorithm_names",
    "init",
    "op_names",
    "premul_sum",
    "reduce_op",
    "run_processes",
    "run_threads",
    "schedule",
    "unregister",
]
METHODS = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "capture_all_reduce",
    "close",
    "reduce",
    "reduce_scatter",
    "synchronize",
]


def test_exported_names() -> None:
    assert microddp.__all__ == EXPORTED == sorted(EXPORTED)
    for name in EXPORTED:
        value = getattr(microddp, name)
        assert inspect.getdoc(value), name
    public = [name for name, value in inspect.getmembers(microddp.Communicator, inspect.isfunction)]
    assert sorted(name for name in public if not name.startswith("_")) == METHODS
    assert [name for name in vars(microddp.Work) if not name.startswith("_")] == ["done", "wait", "synchronize"]


def test_schedule_is_the_function_and_the_subpackage_imports() -> None:
    assert inspect.isfunction(microddp.schedule)
    assert microddp.schedule("ring", world_size=4).num_steps() == 6
    assert inspect.ismodule(ring) and find_algorithm("ring").steps is ring.ring
    assert Step.__module__ == "microddp.schedule.ir"
    assert inspect.ismodule(sys.modules["microddp.schedule"])


def test_importing_is_light_and_any_way_of_importing_works() -> None:
    code = """
        import sys
        def check_light():
            heavy = {"triton", "cupy", "rich", "sklearn"} & set(sys.modules)
            assert not heavy, heavy
        from microddp.schedule.ring import ring
        import microddp.schedule, microddp, importlib, torch
        check_light()
        assert not torch.cuda.is_initialized()
        microddp.schedule("ring", 4)
        next(ring(0, 4))
        assert importlib.import_module("microddp.schedule").ring.ring is ring
        microddp.run_threads(lambda comm: comm.all_reduce(torch.ones(9), op="avg"), 2)
        check_light()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=True, timeout=100)


def test_a_users_algorithm_is_proved_and_used() -> None:
    microddp.algorithm("mine", num_chunks="world_size")(lambda *args: find_algorithm("ring").steps(*args))
    microddp.algorithm("wrong")(lambda *args: find_algorithm("broadcast").steps(*args, root=0))
    try:
        assert run(lambda comm: comm.all_reduce(torch.ones(7), algorithm="mine").tolist(), 3) == [[3.0] * 7] * 3
        for error in outcomes(lambda comm: comm.all_reduce(torch.ones(7), algorithm="wrong"), 3):
            assert type(error) is microddp.ScheduleError
    finally:
        microddp.unregister("mine")
        microddp.unregister("wrong")
    for error in outcomes(lambda comm: comm.all_reduce(torch.ones(7), algorithm="mine"), 3):
        assert type(error) is ValueError and "mine" in str(error)


def test_a_name_that_is_registered_anew_means_the_new_algorithm() -> None:
    x = torch.ones(3)
    with microddp.init() as comm:
        for num_chunks in (1, 2):
            microddp.algorithm("anew", num_chunks=num_chunks)(lambda *args: iter(()))
            try:
                assert comm.all_reduce(x, algorithm="anew") is x
                (prepared,) = comm._planner._prepared.values()
                assert prepared.schedule.num_chunks == num_chunks
            finally:
                microddp.unregister("anew")
        with pytest.raises(ValueError, match="anew"):
            comm.all_reduce(x, algorithm="anew")

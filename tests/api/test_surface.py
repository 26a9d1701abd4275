"""What the package offers, under which names, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import microddp
import microddp.schedule
from microddp.schedule import Step, find_algorithm, ring

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]

EXPORTED = [
    "Choice",
    "ClosedError",
    "CollectiveTimeoutError",
    "Communicator",
    "Counters",
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
    "run_processes",
    "run_threads",
    "schedule",
    "unregister",
]
METHODS = ["all_gather", "all_reduce", "barrier", "broadcast", "close", "reduce", "reduce_scatter"]


def test_exported_names() -> None:
    assert microddp.__all__ == EXPORTED == sorted(EXPORTED)
    for name in EXPORTED:
        value = getattr(microddp, name)
        assert inspect.getdoc(value), name
    public = [name for name, value in vars(microddp.Communicator).items() if inspect.isfunction(value)]
    assert sorted(name for name in public if not name.startswith("_")) == METHODS
    assert [name for name in vars(microddp.Work) if not name.startswith("_")] == ["wait", "done", "run"]


def test_schedule_is_the_function_and_the_subpackage_imports() -> None:
    assert inspect.isfunction(microddp.schedule)
    assert microddp.schedule("ring", world_size=4).num_steps() == 6
    assert inspect.ismodule(ring) and find_algorithm("ring").steps is ring.ring
    assert Step.__module__ == "microddp.schedule.ir"
    assert inspect.ismodule(sys.modules["microddp.schedule"])


@pytest.mark.parametrize(
    "code",
    [
        "import microddp; microddp.schedule('ring', 4)",
        "import microddp.schedule; import microddp; microddp.schedule('ring', 4)",
        "from microddp.schedule import ring; import microddp; microddp.schedule('ring', 4); ring.ring",
        "from microddp.schedule.ring import ring; import microddp; microddp.schedule('ring', 4); ring(0, 4)",
        "import importlib, microddp; importlib.import_module('microddp.schedule').ring.ring",
        "import microddp, sys; heavy = {'triton', 'cupy', 'rich', 'sklearn'} & set(sys.modules); assert not heavy, heavy",
        "import microddp, torch; assert not torch.cuda.is_initialized()",
        "import microddp, torch, sys\n"
        "microddp.run_threads(lambda comm: comm.all_reduce(torch.ones(9), op='avg'), 2)\n"
        "assert not {'triton', 'cupy', 'rich', 'sklearn'} & set(sys.modules)",
    ],
)
def test_imports(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=50)


def test_a_users_algorithm_is_proved_and_used() -> None:
    import torch

    from microddp.schedule import find_algorithm as find
    from tests.api.tools import outcomes, run

    microddp.algorithm("mine", num_chunks="world_size")(lambda *args: find("ring").steps(*args))
    microddp.algorithm("wrong")(lambda *args: find("broadcast").steps(*args, root=0))
    try:
        assert run(lambda comm: comm.all_reduce(torch.ones(7), algorithm="mine").tolist(), 3) == [[3.0] * 7] * 3
        for error in outcomes(lambda comm: comm.all_reduce(torch.ones(7), algorithm="wrong"), 3):
            assert type(error) is microddp.ScheduleError
    finally:
        microddp.unregister("mine")
        microddp.unregister("wrong")
    for error in outcomes(lambda comm: comm.all_reduce(torch.ones(7), algorithm="mine"), 3):
        assert type(error) is ValueError and "mine" in str(error)

"""What the tests over the stand-in for NCCL share: built once for all processes of a run, loaded once in each."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nccl.build import LIBRARY_VARIABLE, build, load_standin, why_not
from tests.nccl.standin_runtime import StandInRuntime


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built stand-in; ``MICRODDP_STANDIN`` names it to child processes."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if LIBRARY_VARIABLE not in os.environ:
        base = tmp_path_factory.getbasetemp()
        is_worker = "PYTEST_XDIST_WORKER" in os.environ  # whose own folder lies in the one of all workers
        os.environ[LIBRARY_VARIABLE] = str(build(base.parent if is_worker else base))
    return Path(os.environ[LIBRARY_VARIABLE])


@pytest.fixture(scope="session")
def standin(standin_library: Path) -> ctypes.CDLL:
    """The stand-in, under CuPy's bindings, in this process."""
    return load_standin(standin_library)


@pytest.fixture
def runtime(standin: ctypes.CDLL) -> Iterator[StandInRuntime]:
    """A runtime that blocks the host; nothing may have raised on its streams, and its threads must end."""
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

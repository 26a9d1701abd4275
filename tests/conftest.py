"""What holds for every test: how hypothesis searches, how many threads torch takes, and that nothing is left behind."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
from hypothesis import settings


def _hear_interrupts() -> None:
    """A shell's background jobs start with SIGINT ignored, and so would every process that the tests interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_hear_interrupts()

# torch asks for the name of every address that its store connects to: a name server that is slow to answer, or not
# there, must not cost five seconds each time. Read when a process, or a thread of it, first looks for a name.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

GRACE_S = 5.0  # for what is already on its way out when a test module ends

# "gate" tries the same examples in every run, so that a failure on one machine is one on all.
settings.register_profile("gate", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("thorough", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("MICRODDP_HYPOTHESIS", "gate"))


def pytest_configure() -> None:
    torch.set_num_threads(1)  # ranks are threads and processes here: more threads in each only fight for the cores


def pytest_report_header() -> str:
    names = ("torch", "triton", "numpy")
    return ", ".join(f"{name} {_version(name)}" for name in names) + f", {os.cpu_count()} cores"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The documentation last: what it shows is only worth running on code that passes."""
    items.sort(key=lambda item: item.get_closest_marker("docs") is not None)


@pytest.fixture(scope="module", autouse=True)
def no_threads_or_processes_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the last test of a module that leaves a thread or a process behind which nobody would end.

    Daemon processes of multiprocessing are let live until the end of the run, for pools that several modules share.
    """
    threads_before, processes_before = _threads(), child_pids()
    yield
    left = settle(lambda: describe_leaks(threads_before, processes_before, allow_daemons=True))
    if left:
        pytest.fail(f"{request.node.nodeid} left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_processes_left_at_all() -> Iterator[None]:
    """Fails the run's last test if any child process outlives the fixtures."""
    threads_before, processes_before = _threads(), child_pids()
    yield
    left = settle(lambda: describe_leaks(threads_before, processes_before, allow_daemons=False))
    if left:
        pytest.fail(f"the run left behind: {'; '.join(left)}", pytrace=False)


def describe_leaks(threads_before: set[threading.Thread], pids_before: set[int], allow_daemons: bool) -> list[str]:
    """One text for each live non-daemon thread and child process that is not among those from before."""
    threads = [f"thread {thread.name!r}" for thread in _threads() - threads_before]
    daemons = {child.pid for child in multiprocessing.active_children() if child.daemon}
    allowed = pids_before | (daemons if allow_daemons else set())
    processes = [f"process {pid} ({_command(pid)})" for pid in sorted(child_pids() - allowed)]
    return sorted(threads) + processes


def settle(describe: Callable[[], list[str]], grace_s: float = GRACE_S) -> list[str]:
    """Polls until ``describe`` finds nothing or the grace is over; returns what it found last."""
    deadline = time.monotonic() + grace_s
    while (found := describe()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def child_pids() -> set[int]:
    """Live or unreaped children of this process, but for multiprocessing's own helper, which lives as long as we do."""
    helper: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    if not Path("/proc/self/stat").exists():  # not Linux: those that multiprocessing knows
        return {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    multiprocessing.active_children()  # reaps those that have ended
    found = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid for pid in found if _parent(pid) == os.getpid()} - {helper}


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # gone since the folder was listed
        return None


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip() or "zombie"
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"

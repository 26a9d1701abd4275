"""Ranks as local processes: results, the first error with its traceback, deaths, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from microddp.errors import CollectiveTimeoutError, RemoteError, TransportError
from microddp.processes import RankProcesses, run_process_ranks
from microddp_kernels.dtypes import BOOL, COMPLEX, FLOATS, FLOATS8, UNSIGNED
from tests import processes_cases
from tests.transport.gloo_pool import QUICK_NAMES

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(2, env={**QUICK_NAMES, "MARK": "here"}) as started:
        yield started


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_know_where_they_are(ranks: RankProcesses) -> None:
    found = ranks.call(processes_cases.describe, "word")
    assert [each["pid"] for each in found] == ranks.pids
    threads = max(1, (os.cpu_count() or 1) // 2)
    if "OMP_NUM_THREADS" in os.environ:
        threads = found[0]["threads"]
    for rank, each in enumerate(found):
        expected: dict[str, object] = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        expected |= {
            "MASTER_ADDR": "127.0.0.1",
            "MARK": "here",
            "rank": rank,
            "word": "word",
            "threads": threads,
            "pid": each["pid"],
        }
        assert each == expected
    assert "MARK" not in os.environ and "RANK" not in os.environ


def test_tensors_travel_by_value(ranks: RankProcesses) -> None:
    given = torch.arange(4)
    results = ranks.call(processes_cases.tensors, given)
    again = ranks.call(processes_cases.tensors, given)
    assert given.tolist() == [0, 1, 2, 3]
    for rank, (first, second) in enumerate(zip(results, again)):
        assert first["view"].tolist() == second["view"].tolist() == [1 + rank, 2 + rank, 3 + rank]
        assert torch.equal(first["half"], torch.full((2, 2), rank, dtype=torch.bfloat16))
        assert not first["view"].is_shared()


@pytest.mark.parametrize("dtype", sorted(UNSIGNED | FLOATS8 | COMPLEX | FLOATS | BOOL, key=str), ids=str)
def test_tensors_of_every_type_travel(ranks: RankProcesses, dtype: torch.dtype) -> None:
    bits = torch.arange(96, dtype=torch.uint8).remainder(2 if dtype == torch.bool else 64)
    given = bits.view(dtype).reshape(2, -1).t()
    nested = {"all": given, "one": given[0, 0], "none": given[:0]}
    for found in ranks.call(processes_cases.returned, nested):
        for name, tensor in nested.items():
            assert found[name].dtype == dtype and found[name].shape == tensor.shape
            same = [each.reshape(-1).view(torch.uint8).tolist() for each in (found[name], tensor)]
            assert same[0] == same[1]


def test_torchs_own_group_works_in_the_ranks(ranks: RankProcesses) -> None:
    assert ranks.call(processes_cases.torchs_own_group) == [11.0, 11.0]


def test_what_cannot_be_sent_is_refused_before_anything_starts(ranks: RankProcesses) -> None:
    def local(_: object) -> None:
        raise NotImplementedError

    started = time.monotonic()
    with pytest.raises(TypeError, match=r"function '.*<locals>.local' cannot be sent.*top level of a module"):
        run_process_ranks(local, 2)
    with pytest.raises(TypeError, match=r"function '.*<lambda>' cannot be sent"):
        run_process_ranks(lambda _: None, 2)
    with pytest.raises(TypeError, match=r"argument 1 of 'describe', a generator, cannot be sent"):
        run_process_ranks(processes_cases.describe, 2, args=("word", (word for word in ["a"])))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        run_process_ranks(processes_cases.describe, 0)
    assert time.monotonic() - started < 1.0
    with pytest.raises(TypeError, match=r"<lambda>' cannot be sent"):
        ranks.call(lambda _: None)
    assert not ranks.broken


FAILURES: dict[str, tuple[type[Exception], str, str]] = {
    # how: (what is raised, its text, its cause's text)
    "raise, others busy": (KeyError, "no such thing", 'raise KeyError("no such thing")'),
    "awkward": (RemoteError, "rank 1 raised Awkward: this that\nTraceback", ""),
    "exit": (TransportError, "rank 1 exited with code 3 before it returned", ""),
    "kill": (TransportError, "rank 1 was killed by SIGKILL before it returned", ""),
    "lambda": (TypeError, "the result of rank 1, a function, cannot be sent", "rank 1 raised TypeError"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_the_first_error_is_raised_and_nobody_is_left(how: str, tmp_path: Path) -> None:
    expected, text, cause = FAILURES[how]
    with pytest.raises(expected) as raised:
        run_process_ranks(processes_cases.fail, 2, args=(how, str(tmp_path)), timeout=60, env=QUICK_NAMES)
    assert type(raised.value) is expected
    assert text in str(raised.value)
    assert cause in str(raised.value.__cause__)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_timeout_ends_the_ranks(tmp_path: Path) -> None:
    ranks = RankProcesses(2, env=QUICK_NAMES)
    ranks.call(processes_cases.describe, "started")
    started = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"ranks 0, 1 of 2 had not returned after 0.5 s"):
        ranks.call(processes_cases.fail, "sleep", str(tmp_path), timeout=0.5)
    assert time.monotonic() - started < 5.0
    assert not any(map(is_running, ranks.pids))
    with pytest.raises(RuntimeError, match=r"these processes have ended: CollectiveTimeoutError: ranks 0, 1"):
        ranks.call(processes_cases.describe, "again")
    ranks.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_parent_leaves_nobody(number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "from microddp.processes import run_process_ranks\n"
        "from tests.processes_cases import fail\n"
        "if __name__ == '__main__':\n"
        f"    run_process_ranks(fail, 2, args=('sleep', {str(tmp_path)!r}))\n"
    )
    (tmp_path / "program.py").write_text(program)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, **QUICK_NAMES, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    paths = [tmp_path / str(rank) for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths) or parent.poll() is not None, 60)
    pids = [int(path.read_text()) for path in paths]
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=20)
    wait_until(lambda: not any(map(is_running, pids)), 10)
    assert number == signal.SIGKILL or errors.count("KeyboardInterrupt") == 1


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)

"""Ranks that die, hang or leave: all others raise in time, and what was sent arrives."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.transport import gloo_death_cases
from tests.transport.gloo_forks import fork_server, run_forks

pytestmark = pytest.mark.timeout(60)

WORLD_SIZE = 4
NUMEL = 1 << 24  # 64 MiB
DEADLINE_S = 15.0


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with fork_server():
        yield


@pytest.mark.parametrize("rank_0_hosts", [False, True])
@pytest.mark.parametrize(
    ("victim", "how", "at_step", "code"),
    [(2, "exit", -1, 3), (2, "exit", 1, 3), (2, "kill", 1, -signal.SIGKILL), (0, "kill", 1, -signal.SIGKILL)],
)
def test_death_reaches_every_rank(victim: int, how: str, at_step: int, code: int, rank_0_hosts: bool) -> None:
    ends = run_forks(
        gloo_death_cases.ring, WORLD_SIZE, NUMEL, victim, how, at_step, DEADLINE_S, rank_0_hosts=rank_0_hosts
    )
    assert ends[victim] == (None, code)
    for rank, (report, exit_code) in enumerate(ends):
        if rank == victim:
            continue
        assert exit_code == 0
        kind, text, seconds = report
        print(f"rank {rank}: {seconds:.2f} s {text}")
        assert kind == "TransportError", text
        assert text.startswith(f"rank {rank} of 4: all_reduce by ring, collective 1, ")
        assert seconds < 6.0
        if not rank_0_hosts or victim != 0:
            assert f"lost its connection to rank {victim}" in text


@pytest.mark.parametrize(("victim", "rank_0_hosts"), [(2, False), (0, True)])
def test_a_stopped_rank_is_a_timeout_everywhere(victim: int, rank_0_hosts: bool) -> None:
    """Also if it hosts the store, which then hangs too."""
    ends = run_forks(gloo_death_cases.ring, WORLD_SIZE, 1 << 20, victim, "stop", 1, 4.0, rank_0_hosts=rank_0_hosts)
    assert ends[victim] == (None, -signal.SIGKILL)
    for rank, (report, exit_code) in enumerate(ends):
        if rank == victim:
            continue
        kind, text, seconds = report
        print(f"rank {rank}: {seconds:.2f} s {text}")
        assert kind == "CollectiveTimeoutError", text
        assert text.startswith(f"rank {rank} of 4: all_reduce by ring, collective 1, step ")
        assert "from rank" in text or "to rank" in text
        assert 3.5 < seconds < 8.0
        assert exit_code == 0


@pytest.mark.parametrize("how", ["_exit", "close", "return"])
@pytest.mark.parametrize(("numel", "repeats"), [(1, 4), (1 << 20, 4)])
def test_leaving_at_once_loses_nothing(numel: int, repeats: int, how: str) -> None:
    for repeat in range(repeats):
        ends = run_forks(gloo_death_cases.all_reduce_and_leave, WORLD_SIZE, numel, how, rank_0_hosts=repeat % 2 == 1)
        assert ends == [(1111.0, 0)] * WORLD_SIZE


def test_leaving_before_the_others_are_connected() -> None:
    for _ in range(8):
        assert run_forks(gloo_death_cases.leave_at_once, WORLD_SIZE) == [(rank, 0) for rank in range(WORLD_SIZE)]

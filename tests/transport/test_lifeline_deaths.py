"""A rank's death reaches all others by the lifeline at once, without a store; every rank is a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microddp.transport.noticeboard import Failure
from tests.transport.gloo_forks import fork_server
from tests.transport.lifeline_forks import LIMIT_S, Rank, lifeline_ranks

pytestmark = pytest.mark.timeout(40)

AT_ONCE_S = 1.0  # 0.06 s where nothing else runs


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with fork_server():
        yield


def check_survivors(ranks: list[Rank], dead: set[int], when: float, within_s: float = AT_ONCE_S) -> list[Failure]:
    """Each has heard of exactly one failure, in time; returns them."""
    survivors = [each for rank, each in enumerate(ranks) if rank not in dead]
    for each in survivors:
        each.wait_for("failure")
    heard = [each.leave() for each in survivors]
    for failures in heard:
        assert [name for name, _, _ in failures] == ["failure"]
    delays = [failures[0][2] - when for failures in heard]
    print(f"{len(ranks)} ranks without {sorted(dead)}: told after {min(delays):.3f} to {max(delays):.3f} s")
    assert max(delays) < within_s
    return [failures[0][1] for failures in heard]


@pytest.mark.parametrize(
    ("world_size", "victims"),
    [(2, (0,)), (2, (1,)), (3, (1,)), *((8, (rank,)) for rank in (0, 1, 4, 7)), (8, (3, 4)), (8, (7, 0)), (8, (1, 5))],
    ids=str,
)
def test_death_reaches_every_rank(world_size: int, victims: tuple[int, ...], tmp_path: Path) -> None:
    with lifeline_ranks(world_size, tmp_path) as ranks:
        killed = [ranks[victim].kill() for victim in victims]
        for failure in check_survivors(ranks, set(victims), min(killed)):
            pairs = [(step, victim) for victim in victims for step in (1, -1)]
            seen_from = {((victim + step) % world_size, victim) for step, victim in pairs}
            assert failure.kind == "lost"
            texts = {f"rank {rank} lost its connection to rank {victim}, which" for rank, victim in seen_from}
            assert any(failure.text.startswith(text) for text in texts), failure


def test_a_reason_given_before_death_is_the_one_told(tmp_path: Path) -> None:
    with lifeline_ranks(4, tmp_path) as ranks:
        when = time.monotonic()
        ranks[2].tell("publish and die", "remote", 2, "rank 2 raised KeyError")
        assert check_survivors(ranks, {2}, when) == [Failure("remote", 2, "rank 2 raised KeyError")] * 3
        ranks[2].process.join(LIMIT_S)
        assert ranks[2].process.exitcode == 5


def test_a_stopped_rank_is_no_failure_and_hears_of_one_later(tmp_path: Path) -> None:
    with lifeline_ranks(3, tmp_path) as ranks:
        stopped = ranks[1].process.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        ranks[0].kill()
        assert ranks[2].wait_for("failure")[0].text.startswith("rank 2 lost its connection to rank 0")
        os.kill(stopped, signal.SIGCONT)
        check_survivors(ranks, {0}, time.monotonic())


def test_a_forked_child_neither_hides_the_death_of_its_parent_nor_speaks_for_it(tmp_path: Path) -> None:
    with lifeline_ranks(3, tmp_path) as ranks:
        ranks[1].tell("fork")
        child, _ = ranks[1].wait_for("forked")
        try:
            ranks[1].wait_for("child")
            assert not ranks[0].heard[1:] and not ranks[0].connection.poll()
            when = ranks[1].kill()
            for failure in check_survivors(ranks, {1}, when):
                assert failure.kind == "lost" and "rank 1" in failure.text
            os.kill(child, 0)  # it lived all the while
        finally:
            os.kill(child, signal.SIGKILL)

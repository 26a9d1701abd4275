"""Ranks over the stand-in that are killed, stopped, late or elsewhere: all others raise in time, and say who it was.

The stand-in reports no deaths here unless it is said, as NCCL does not on one host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nccl import faults_cases as cases
from tests.nccl import faults_setup_cases
from tests.nccl.faults_tools import Rank, Zygote, zygote

pytestmark = pytest.mark.timeout(60)

FULL = os.environ.get("MICRODDP_NCCL_FULL") == "1"
RAISED_S = 2.0  # after a death; and after a deadline
GONE_S = 5.0  # after the error
DEADLINE_S = 1.0
LOUD = {"STANDIN_QUIET_DEATH": "0"}


@pytest.fixture(scope="module")
def nursery(standin_library: Path) -> Iterator[Zygote]:
    with zygote() as made:
        yield made


def everywhere(sizes: tuple[int, ...]) -> list[tuple[int, str, int]]:
    """(world size, algorithm, victim)."""
    return [
        (size, algorithm, victim)
        for size in sizes
        for algorithm in ("ring", "tree", "direct")
        for victim in range(size)
    ]


def survivors(ranks: list[Rank], victim: int) -> list[Rank]:
    return [each for each in ranks if each.rank != victim]


def strike(ranks: list[Rank], victim: int) -> float:
    """Lets ``victim`` fall once all others have called the collective; returns when it did."""
    for each in survivors(ranks, victim):
        each.wait_for("calls")
    ranks[victim].tell("call")
    return ranks[victim].wait_for("struck")[1]


def expect_exit(rank: Rank, raised: float, code: int = 1) -> None:
    """It ends by itself, soon, and Python's shutdown has nothing to complain of."""
    found, gone = rank.exit(GONE_S + 1)
    assert found == code, rank.printed()
    assert gone - raised < GONE_S
    assert "Exception ignored" not in rank.printed()
    assert "NoneType" not in rank.printed()


KILLS = everywhere((2, 3, 4)) if FULL else [(2, "ring", 0), (4, "tree", 2)]


@pytest.mark.parametrize(("world_size", "algorithm", "victim"), KILLS)
def test_a_killed_rank_is_named_by_all_others(nursery: Zygote, world_size: int, algorithm: str, victim: int) -> None:
    groups = 3 * ((victim + world_size) % 2)  # before its first group, or after some
    hosts = victim == 0 or world_size == 3  # the store is in rank 0's process
    args = algorithm, victim, "kill", groups, 20.0, hosts
    with nursery.ranks(cases.fall, world_size, *args, hurry=FULL or world_size > 2) as ranks:
        struck = strike(ranks, victim)
        for each in survivors(ranks, victim):
            (kind, text), raised = each.wait_for("raised")
            print(f"rank {each.rank}: killed → raised {raised - struck:.3f} s: {text}")
            assert kind == "TransportError"
            assert text.startswith(f"rank {each.rank} of {world_size}: all_reduce by {algorithm}, collective 2")
            assert f"lost its connection to rank {victim}, which exited, was killed or failed" in text
            assert raised - struck < RAISED_S
            expect_exit(each, raised)
        assert ranks[victim].exit()[0] == -signal.SIGKILL


@pytest.mark.skipif(not FULL, reason="MICRODDP_NCCL_FULL=1 runs it")
@pytest.mark.parametrize("victim", [0, 5])
def test_one_of_eight_is_killed(nursery: Zygote, victim: int) -> None:
    with nursery.ranks(cases.fall, 8, "ring", victim, "kill", 3, 20.0, True, hurry=True) as ranks:
        struck = strike(ranks, victim)
        for each in survivors(ranks, victim):
            (kind, text), raised = each.wait_for("raised")
            print(f"rank {each.rank}: killed → raised {raised - struck:.3f} s")
            assert kind == "TransportError" and f"lost its connection to rank {victim}" in text
            assert raised - struck < RAISED_S


@pytest.mark.parametrize("quiet", [True, False] if FULL else [False])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "direct"] if FULL else ["tree"])
def test_killed_from_outside_at_any_moment(nursery: Zygote, algorithm: str, quiet: bool) -> None:
    """Also where NCCL itself reports the death: the reason is still the rank that died."""
    with nursery.ranks(cases.endless, 3, algorithm, env=None if quiet else LOUD, hurry=True) as ranks:
        for each in ranks:
            each.wait_for("running")
        struck = ranks[1].signal(signal.SIGKILL)
        for each in survivors(ranks, 1):
            (kind, text), raised = each.wait_for("raised")
            print(f"rank {each.rank}: killed → raised {raised - struck:.3f} s: {text}")
            assert "rank 1, which exited, was killed or failed" in text
            assert kind in ("TransportError", "ClosedError")
            assert raised - struck < RAISED_S
            expect_exit(each, raised)


def test_who_is_elsewhere_learns_of_a_death_at_its_next_call(nursery: Zygote) -> None:
    with nursery.ranks(cases.next_call_of_the_idle, 3, 2, hurry=True) as ranks:
        for each in ranks:
            each.wait_for("idle")
        for each in ranks:
            each.tell("go on")
        _, struck = ranks[2].wait_for("struck")
        for each in ranks[:2]:
            assert each.wait_for("knows")[1] - struck < RAISED_S
            (kind, text), _ = each.wait_for("raised")
            assert kind == "ClosedError", text
            assert "lost its connection to rank 2" in text


@pytest.mark.parametrize("hosts", [False, True] if FULL else [True])
def test_rank_0_dies_before_it_publishes_the_id(nursery: Zygote, hosts: bool) -> None:
    with nursery.ranks(faults_setup_cases.never_an_id, 4, "kill", hosts, 20.0, hurry=True) as ranks:
        _, struck = ranks[0].wait_for("struck")
        for each in ranks[1:]:
            (kind, text), raised = each.wait_for("raised")
            print(f"rank {each.rank}: killed → raised {raised - struck:.3f} s: {text}")
            assert kind == "TransportError"
            assert "lost its connection to rank 0" in text
            assert raised - struck < RAISED_S
            assert each.exit()[0] == 1


STOPS = everywhere((2, 3, 4)) if FULL else [(3, "ring", 1), (2, "direct", 0)]


@pytest.mark.parametrize(("world_size", "algorithm", "victim"), STOPS)
def test_a_stopped_rank_is_named_after_the_deadline(
    nursery: Zygote, world_size: int, algorithm: str, victim: int
) -> None:
    """Continued, it finds out too, and ends. Where it hosts the store, nobody can know more than whom it waits for."""
    hosts = victim == 0 and world_size != 3
    args = algorithm, victim, "stop", 3 * (world_size % 2), DEADLINE_S, hosts
    with nursery.ranks(cases.fall, world_size, *args, hurry=True) as ranks:
        strike(ranks, victim)
        for each in survivors(ranks, victim):
            (kind, text), raised = each.wait_for("raised")
            late = raised - each.wait_for("calls")[1] - DEADLINE_S
            print(f"rank {each.rank}: deadline → raised {late:.3f} s: {text}")
            assert kind == "CollectiveTimeoutError", text
            assert text.startswith(f"rank {each.rank} of {world_size}: all_reduce by {algorithm}, collective 2, step ")
            if hosts:
                assert "the store does not answer: its host may be stopped" in text
            else:
                assert f"rank {victim} does not respond (it is stopped, or has died)" in text
            assert -0.05 < late < RAISED_S
            expect_exit(each, raised)
        continued = ranks[victim].signal(signal.SIGCONT)
        (kind, text), raised = ranks[victim].wait_for("raised")
        assert kind in ("CollectiveTimeoutError", "TransportError", "ClosedError"), text
        assert raised - continued < DEADLINE_S + RAISED_S
        expect_exit(ranks[victim], raised)


@pytest.mark.parametrize("known", [True, False] if FULL else [False])
def test_a_rank_that_never_comes_is_named(nursery: Zygote, known: bool) -> None:
    """It runs, and answers: it has not entered the collective."""
    with nursery.ranks(cases.never_comes, 3, 1, known, DEADLINE_S, hurry=True) as ranks:
        for each in survivors(ranks, 1):
            (kind, text), raised = each.wait_for("raised")
            late = raised - each.wait_for("calls")[1] - DEADLINE_S
            print(f"rank {each.rank}: deadline → raised {late:.3f} s: {text}")
            assert kind == "CollectiveTimeoutError", text
            assert "rank 1 has not entered it" in text
            assert f"all_reduce by {'ring' if known else 'direct'}, collective 1" in text
            if known:
                assert "step 0, sending to rank" in text
            assert -0.05 < late < RAISED_S
        ranks[1].tell("call")
        (kind, text), _ = ranks[1].wait_for("raised")
        assert kind == "ClosedError"
        assert "the deadline passed" in text


def test_a_rank_that_pauses_within_the_deadline_is_no_failure(nursery: Zygote) -> None:
    with nursery.ranks(cases.paused, 3, 200, hurry=True) as ranks:
        ranks[1].wait_for("a quarter")
        ranks[1].signal(signal.SIGSTOP)
        with pytest.raises(AssertionError, match="has not said"):
            ranks[0].wait_for("done", 1.0)  # long enough for every suspicion there is
        ranks[1].signal(signal.SIGCONT)
        for each in ranks:
            each.wait_for("done")
            assert each.exit()[0] == 0, each.printed()


@pytest.mark.parametrize("busy", [0, 1] if FULL else [1])
def test_a_rank_that_lets_no_thread_run_is_no_failure(nursery: Zygote, busy: int) -> None:
    with nursery.ranks(cases.computes, 2, busy, 3.0 if FULL else 1.5, hurry=True) as ranks:
        for each in ranks:
            each.wait_for("done")
            assert each.exit()[0] == 0, each.printed()


@pytest.mark.parametrize("known", [True, False] if FULL else [False])
def test_a_rank_that_closes_is_no_timeout(nursery: Zygote, known: bool) -> None:
    with nursery.ranks(cases.closes_early, 3, 1, known, hurry=True) as ranks:
        struck = strike(ranks, 1)
        for each in survivors(ranks, 1):
            (kind, text), raised = each.wait_for("raised")
            assert kind == "TransportError" and "rank 1 closed its transport" in text
            assert raised - struck < RAISED_S
        assert ranks[1].exit()[0] == 0


def test_an_exception_of_the_users_reaches_all(nursery: Zygote) -> None:
    with nursery.ranks(cases.raises_inside, 3, 2, hurry=True) as ranks:
        struck = strike(ranks, 2)
        for each in survivors(ranks, 2):
            (kind, text), raised = each.wait_for("raised")
            assert kind == "RemoteError"
            assert "rank 2 raised RuntimeError: the user's own" in text and "raises_inside" in text
            assert raised - struck < RAISED_S / 2
        expect_exit(ranks[2], struck)


WAYS = ["close", "twice", "exit", "pending", "half pending", "failed", "one closes", "interrupt"]


@pytest.mark.parametrize("how", WAYS if FULL else ["exit", "half pending"])
def test_every_way_to_leave_ends_soon(nursery: Zygote, how: str) -> None:
    with nursery.ranks(cases.leaves, 2, how) as ranks:
        for each in ranks:
            each.wait_for("leaves")
        if how == "failed":
            ranks[0].tell("fail")
        for each in ranks:
            _, leaves = each.wait_for("leaves")
            failed = how == "interrupt" or (how == "failed" and each.rank == 1)
            expect_exit(each, leaves, {"interrupt": -signal.SIGINT}.get(how, 1) if failed else 0)
            if not failed and how != "half pending":
                assert each.printed() == ""

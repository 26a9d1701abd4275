"""The model of NCCL's queue rules: what it says of programs whose fate is known."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.nccl.model import judge
from tests.nccl.model_calls import Call, Deadlock, GroupEnd, GroupStart, Recv, Send, Verdict
from tests.nccl.model_differential import Expected, Outcome, play, random_programs
from tests.nccl.model_faults import FaultyNccl, SwappedGroups, UngroupedStep, WrongCount, WrongPeer
from tests.nccl.model_recording import RecordingNccl

pytestmark = pytest.mark.timeout(30)

NUM_RANDOM = 1000 if int(os.environ.get("MICRODDP_INTERLEAVINGS", "0")) >= 10_000 else 200

Program = list[Call]


def grouped(*calls: Call) -> Program:
    return [GroupStart(), *calls, GroupEnd()]


def ring(world_size: int, *, num_steps: int = 2, is_grouped: bool = True) -> list[Program]:
    programs = []
    for rank in range(world_size):
        calls: Program = [Send((rank + 1) % world_size, 8), Recv((rank - 1) % world_size, 8)]
        programs.append((grouped(*calls) if is_grouped else calls) * num_steps)
    return programs


def test_how_far_each_rank_gets() -> None:
    first: Program = [Send(1, 1), Recv(1, 1)]
    second: Program = [Recv(0, 1), Send(0, 1)]
    programs = [[*grouped(*first), *first, Recv(1, 1)], [*grouped(*second), *second, Recv(0, 1)]]
    verdict = judge(programs)
    assert verdict.completed == (3, 3) and not verdict.completes
    programs[0][-1] = Send(1, 1)
    assert judge(programs).completed == (4, 4)
    itself: list[Program] = [grouped(Send(0, 1), Send(1, 1)), grouped(Recv(0, 1))]
    assert judge(itself).completed == (0, 0)  # the group is refused as a whole
    itself[0] = grouped(Send(0, 1), Recv(0, 1), Send(1, 1))
    assert judge(itself).completed == (1, 1)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_ring_completes_if_each_step_is_a_group_and_deadlocks_if_not(world_size: int) -> None:
    assert judge(ring(world_size)).problems == ()
    verdict = judge(ring(world_size, is_grouped=False))
    assert not verdict.completes and verdict.names == {"Deadlock", "Ungrouped"}
    (deadlock,) = (each for each in verdict if isinstance(each, Deadlock))
    assert deadlock.ranks == tuple(range(world_size))
    links = [
        f"rank {rank} send→{(rank + 1) % world_size} (call 0), which waits for rank {(rank + 1) % world_size} "
        f"recv←{rank} (call 1)"
        for rank in range(world_size)
    ]
    first = links[0].replace(", which waits", " waits")
    behind = ", which waits behind ".join([first, *links[1:], "rank 0 send→1 (call 0)"])
    assert str(deadlock) == f"deadlock: {behind}"


def test_one_rank_that_does_not_group_does_not_deadlock_a_ring_of_those_that_do() -> None:
    programs = ring(3)
    programs[1] = ring(3, is_grouped=False)[1]
    verdict = judge(programs)
    assert verdict.completes and verdict.names == {"Ungrouped"}


def test_a_rank_that_receives_first_breaks_the_cycle_of_an_ungrouped_ring() -> None:
    programs = ring(4, is_grouped=False)
    programs[2] = [call for pair in zip(programs[2][1::2], programs[2][::2]) for call in pair]
    assert judge(programs).completes


def test_two_directions_of_one_peer_in_two_groups_deadlock_where_both_send_first() -> None:
    send_first = [*grouped(Send(1, 4)), *grouped(Recv(1, 4))]
    assert judge([send_first, [*grouped(Recv(0, 4)), *grouped(Send(0, 4))]]).problems == ()
    verdict = judge([send_first, [*grouped(Send(0, 4)), *grouped(Recv(0, 4))]])
    assert verdict.names == {"Deadlock"}
    assert "rank 0 send→1 (call 1) waits for rank 1 recv←0 (call 4), which waits behind rank 1 send→0" in str(verdict)


def test_groups_of_one_communicator_wait_for_each_other_whatever_streams_they_name() -> None:
    programs: list[Program] = [
        [Send(1, 4, stream=1), Recv(1, 4, stream=2)],
        [Send(0, 4, stream=3), Recv(0, 4, stream=4)],
    ]
    assert "Deadlock" in judge(programs).names


TREE: list[Program] = [  # children of r: 2r + 1 and 2r + 2; up, then down
    [*grouped(Recv(1, 4), Recv(2, 4)), *grouped(Send(1, 4), Send(2, 4))],
    [*grouped(Recv(3, 4), Recv(4, 4)), *grouped(Send(0, 4)), *grouped(Recv(0, 4)), *grouped(Send(3, 4), Send(4, 4))],
    [*grouped(Send(0, 4)), *grouped(Recv(0, 4))],
    [*grouped(Send(1, 4)), *grouped(Recv(1, 4))],
    [*grouped(Send(1, 4)), *grouped(Recv(1, 4))],
]


def test_a_tree_completes_in_its_own_order_only() -> None:
    assert judge(TREE).problems == ()
    early = list(TREE)
    early[1] = [*TREE[1][4:7], *TREE[1][:4], *TREE[1][7:]]  # to the parent before the children have sent
    assert judge(early).completes  # wrong data, but nothing waits in a circle
    early[1] = [*TREE[1][7:10], *TREE[1][:7], *TREE[1][10:]]  # from the parent first
    (deadlock,) = judge(early).problems
    assert isinstance(deadlock, Deadlock) and deadlock.ranks == (0, 1)


def test_two_cycles_are_told_apart_and_who_only_waits_behind_one_is_in_none() -> None:
    pair: list[Program] = [[Send(1, 4), Recv(1, 4)], [Send(0, 4), Recv(0, 4)]]
    others: list[Program] = [[Send(3, 4), Recv(3, 4)], [Send(2, 4), Recv(2, 4), Recv(4, 4)], [Send(3, 4)]]
    found = [each for each in judge([*pair, *others]) if isinstance(each, Deadlock)]
    assert [each.ranks for each in found] == [(0, 1), (2, 3)]


SENDS = grouped(Send(1, 8, label="a"))


@pytest.mark.parametrize(
    ("programs", "names", "text"),
    [
        ([SENDS, grouped(Recv(0, 4))], {"CountMismatch"}, "rank 0 send→1 (call 1) of 8 bytes meets rank 1 recv←0"),
        ([SENDS, []], {"Unmatched"}, "rank 0 send→1 (call 1): rank 1 never posts its other end"),
        ([SENDS, grouped(Recv(2, 8)), []], {"Unmatched"}, "rank 1 recv←2 (call 1): rank 2 never posts"),
        ([SENDS, [GroupStart(), Recv(0, 8)]], {"OpenGroup", "Unmatched"}, "rank 1 never ends the group of call 0"),
        ([SENDS, [*grouped(Recv(0, 8)), GroupEnd()]], {"StrayEnd"}, "rank 1 ends a group that was never started"),
        ([grouped(Send(0, 4), Recv(0, 4))], set(), ""),
        ([[*grouped(Send(0, 4)), *grouped(Recv(0, 4))]], {"Unmatched"}, "has no other end in its own group"),
        ([grouped(Send(0, 4), Recv(0, 2))], {"CountMismatch"}, "of 4 bytes meets rank 0 recv←0 (call 2) of 2 bytes"),
        ([grouped(Send(1, 0)), grouped(Recv(0, 0))], {"ZeroBytes"}, "rank 1 recv←0 (call 1) moves no bytes"),
        ([grouped(Send(1, 0)), []], {"ZeroBytes", "Unmatched"}, "never posts"),
        ([[GroupStart(), *SENDS, GroupEnd()], grouped(*grouped(Recv(0, 8)))], set(), ""),
        ([[GroupStart()], []], {"OpenGroup"}, "which holds nothing"),
    ],
)
def test_each_fault_has_its_name(programs: list[Program], names: set[str], text: str) -> None:
    verdict = judge(programs)
    assert verdict.names == names
    assert text in str(verdict)
    assert verdict.completes == (not names - {"ZeroBytes"})


def test_swapped_groups_show_by_their_labels() -> None:
    sends = [call for step in range(3) for call in grouped(Send(1, 8, label=step))]
    receives = [call for step in (0, 2, 1) for call in grouped(Recv(0, 8, label=step))]
    verdict = judge([sends, receives])
    assert verdict.completes and verdict.names == {"GroupOrder"}
    assert "rank 0 send→1 (call 4) carries 1, but rank 1 recv←0 (call 4) expects 2" in str(verdict)


def test_transfers_of_one_edge_match_in_order_across_groups_of_different_sizes() -> None:
    programs = [grouped(Send(1, 1), Send(1, 2)), [*grouped(Recv(0, 1)), *grouped(Recv(0, 2))]]
    assert judge(programs).problems == ()
    programs[1] = [*grouped(Recv(0, 2)), *grouped(Recv(0, 1))]
    assert judge(programs).names == {"CountMismatch"}


class _Api:
    """What takes all calls and does nothing."""

    NCCL_UINT8 = 1

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def groupStart(self) -> None:
        self.calls.append(("start",))

    def groupEnd(self) -> None:
        self.calls.append(("end",))

    def get_unique_id(self) -> bytes:
        return b"id"

    def NcclCommunicator(self, ndev: int, unique_id: bytes, rank: int) -> _Api:
        return self

    def send(self, *arguments: int) -> None:
        self.calls.append(("send", *arguments))

    def recv(self, *arguments: int) -> None:
        self.calls.append(("recv", *arguments))


def play_ring(apis: Sequence[Any], num_steps: int = 3) -> None:
    """What a ring's transport calls, labels included, on two or more ranks, one after the other."""
    world_size = len(apis)
    for rank, api in enumerate(apis):
        communicator = api.NcclCommunicator(world_size, api.get_unique_id(), rank)
        for step in range(num_steps):
            api.label = step
            api.groupStart()
            communicator.send(100 + step, 8, api.NCCL_UINT8, (rank + 1) % world_size, 7)
            communicator.recv(200 + step, 8, api.NCCL_UINT8, (rank - 1) % world_size, 7)
            api.groupEnd()


def judged(recorders: Sequence[RecordingNccl]) -> Verdict:
    return judge([each.program for each in recorders])


def test_the_recorder_passes_all_on_and_writes_it_down() -> None:
    apis = [_Api(), _Api()]
    recorders = [RecordingNccl(api, rank) for rank, api in enumerate(apis)]
    play_ring(recorders, num_steps=1)
    assert apis[0].calls == [("start",), ("send", 100, 8, 1, 1, 7), ("recv", 200, 8, 1, 1, 7), ("end",)]
    assert recorders[0].program == grouped(Send(1, 8, 7, 0), Recv(1, 8, 7, 0))
    assert judged(recorders).problems == ()
    recorders[0].groupStart()
    assert isinstance(recorders[0].program[-1], GroupStart)
    recorders[0].groupEnd()
    recorders[0].NcclCommunicator(2, b"", 0).send(1, 3, 7, 1, 0)  # float32, no group
    assert recorders[0].program[-1:] == [Send(1, 12, 0, 0)]
    recorders[0].clear()
    assert recorders[0].program == []


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (UngroupedStep, "Ungrouped"),
        (SwappedGroups, "GroupOrder"),
        (WrongPeer, "Unmatched"),
        (WrongCount, "CountMismatch"),
    ],
)
def test_each_injected_fault_is_caught_by_its_name(fault: type[FaultyNccl], name: str, world_size: int) -> None:
    recorders = [RecordingNccl(_Api(), rank) for rank in range(world_size)]
    faulty = fault(recorders[0], 1)
    play_ring([faulty, *recorders[1:]])
    assert faulty.struck
    verdict = judged(recorders)
    assert name in verdict.names
    assert verdict.completes == (name in ("Ungrouped", "GroupOrder"))
    harmless = [RecordingNccl(_Api(), rank) for rank in range(world_size)]
    play_ring([fault(harmless[0], armed=False), *harmless[1:]])
    assert judged(harmless).problems == ()


def test_an_ungrouped_step_of_all_ranks_is_a_deadlock_too() -> None:
    recorders = [RecordingNccl(_Api(), rank) for rank in range(3)]
    play_ring([UngroupedStep(each, 2) for each in recorders])
    assert judged(recorders).names == {"Ungrouped", "Deadlock"}


def test_only_the_group_that_is_swapped_moves() -> None:
    recorder = RecordingNccl(_Api(), 0)
    play_ring([SwappedGroups(recorder, 1), RecordingNccl(_Api(), 1)], num_steps=4)
    labels = [call.label for call in recorder.program if isinstance(call, Send)]
    assert labels == [0, 2, 1, 3]
    starts = [isinstance(call, GroupStart) for call in recorder.program]
    assert all(not (first and second) for first, second in pairwise(starts))


def fate(programs: Sequence[Program], verdict: Verdict) -> tuple[Expected, Outcome]:
    """What the model expects of the stand-in, and what happens there."""
    blocking = {each.name for each in verdict if each.blocks}
    is_exact = "CountMismatch" not in blocking  # which ends communicators, sooner or later
    expected = Expected(
        verdict.completed if is_exact else [0] * len(programs), verdict.completes, blocking == {"CountMismatch"}
    )
    return expected, play(programs, expected)


@pytest.mark.usefixtures("standin")
@pytest.mark.timeout(120)
def test_the_model_and_the_stand_in_agree_on_random_programs() -> None:
    """On whether they complete, how many groups of each rank do, and that the k-th receive gets the k-th send."""
    names: Counter[str] = Counter()
    for seed in range(NUM_RANDOM):
        programs = random_programs(seed)
        verdict = judge(programs)
        expected, outcome = fate(programs, verdict)
        assert outcome.is_over == verdict.completes, (seed, verdict, outcome)
        assert not outcome.wrong, (seed, outcome)
        if expected.fails:
            assert any(outcome.errors), (seed, verdict, outcome)
        elif "CountMismatch" not in verdict.names:
            assert tuple(outcome.completed) == verdict.completed, (seed, verdict, outcome)
        names.update([*verdict.names, "all", *["Completes"] * verdict.completes])
    print(dict(names))
    wanted = {"Completes", "CountMismatch", "Deadlock", "OpenGroup", "Unmatched", "Ungrouped", "ZeroBytes"}
    assert all(names[each] * 50 >= names["all"] for each in wanted), names

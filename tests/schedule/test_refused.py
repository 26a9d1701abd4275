"""Deadlocks and other faults: what the message names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from microddp.errors import ScheduleError
from microddp.schedule import OWN, Fold, Recv, Send, Step, only, schedule
from microddp.schedule.ir import Transfer, num_ranks
from tests.schedule.reference import Stuck, Table, play, schedule_of, table_of


def exchange(first: tuple[Transfer, ...], *others: tuple[Transfer, ...]) -> Table:
    return [[Step((each,)) for each in transfers] for transfers in (first, *others)]


def test_two_ranks_that_both_receive_first_are_a_deadlock() -> None:
    table = exchange((Recv(1, 0, only(1), key=1), Send(1, 0)), (Recv(0, 0, only(0), key=0), Send(0, 0)))
    text = "deadlock: rank 0 waits in step 0 for receive of chunk 0 from rank 1; "
    text += "rank 1 waits in step 0 for receive of chunk 0 from rank 0"
    with pytest.raises(ScheduleError, match=text):
        schedule_of(table, schedule("naive", 2)).verify()
    with pytest.raises(Stuck):
        play(schedule_of(table, schedule("naive", 2)), [1, 2], int.__add__)


def test_sends_are_not_buffered() -> None:
    """Three ranks that each send on before they receive wait for one another too."""
    table = exchange(*((Send((r + 1) % 3, 0), Recv((r - 1) % 3, 0, only((r - 1) % 3), key=0)) for r in range(3)))
    with pytest.raises(ScheduleError, match="deadlock") as failure:
        schedule_of(table, schedule("naive", 3)).verify()
    for rank in range(3):
        assert f"rank {rank} waits in step 0 for send of chunk 0 to rank {(rank + 1) % 3}" in str(failure.value)


def test_only_those_that_wait_are_named() -> None:
    like = schedule("naive", 3)
    table = table_of(like)
    table[0][3] = Step()  # rank 2's result is never sent
    with pytest.raises(ScheduleError, match="deadlock: rank 2 waits in step 3 for receive of chunk 0 from rank 0$"):
        schedule_of(table, like).verify()


REFUSED: dict[str, tuple[Callable[[], Table], str]] = {
    "sends and replaces": (
        lambda: exchange_in_one(Send(1, 0), Recv(1, 0, only(1)), Send(0, 0), Recv(0, 0, only(0))),
        "rank 0, step 0: chunk 0 is overwritten by a receive while in use in the same step; stage it under a key",
    ),
    "replaces twice": (
        lambda: exchange_in_one(Recv(1, 0, only(1)), Recv(1, 0, only(1)), Send(0, 0), Send(0, 0)),
        "rank 0, step 0: chunk 0 is overwritten",
    ),
    "in different steps": (
        lambda: [[Step((Recv(1, 0, only(1), key=1),), folds=(Fold(0, (OWN, 1)),))], [Step(), Step((Send(0, 0),))]],
        "rank 0, step 0: receives what rank 1 sends in step 1; both ends belong in the same step",
    ),
    "never uses": (
        lambda: exchange_in_one(Send(1, 0), Recv(1, 0, only(1), key=4), Send(0, 0), Recv(0, 0, only(0), key=4)),
        "rank 0, step 1: chunk 0 staged under key 4 is never folded or forwarded",
    ),
    "to itself": (lambda: exchange((Send(0, 0),), ()), "rank 0, step 0: peer 0 is not another rank of 2"),
    "counts twice": (
        lambda: [
            [Step((Recv(1, 0, only(1), key=1),), folds=(Fold(0, (OWN, 1)), Fold(0, (OWN, 1))))],
            [Step((Send(0, 0),))],
        ],
        r"rank 0, step 0: chunk 0 would count the contributions of ranks \[1\] twice",
    ),
    "does nothing": (lambda: [[], []], r"rank 0, step 0: ends with chunk 0 holding \[0\], expected \[0, 1\]"),
}


def exchange_in_one(*transfers: Transfer) -> Table:
    half = len(transfers) // 2
    return [[Step(transfers[:half])], [Step(transfers[half:])]]


@pytest.mark.parametrize("case", REFUSED)
def test_message_names_rank_step_and_chunk(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(ScheduleError, match=f"edited over 2 ranks: {text}"):
        schedule_of(make(), schedule("naive", 2)).verify()


def test_carries_count_every_rank_once() -> None:
    """The weights of means are counts: a set that names a rank twice would pass as a set, and weigh wrongly."""
    like = schedule("naive", 2)
    table = table_of(like)
    table[0][0] = replace(table[0][0], transfers=(Recv(1, 0, only(1) + only(1), key=1),))
    assert num_ranks(only(1) + only(1)) == 2
    with pytest.raises(ScheduleError, match="names a rank twice"):
        schedule_of(table, like).verify()


def test_a_staged_value_is_delivered_once_even_if_both_copies_are_used() -> None:
    """The first is folded, the second forwarded: no contribution is counted twice, and still bytes are wasted."""
    like = schedule("full_ring", 3, order="rank")
    first, second = map(list, zip(*table_of(like)))
    again = [Step((Recv(2, 0, only(2), key=9),)), Step(), Step((Send(0, 0),))]
    forward, arrival = second[0].transfers
    second[0] = replace(second[0], transfers=(replace(forward, key=9), arrival))
    with pytest.raises(ScheduleError, match="rank 0, step 1: chunk 0 from rank 2 delivers what is held already"):
        schedule_of([list(steps) for steps in zip(first, again, second)], like).verify()

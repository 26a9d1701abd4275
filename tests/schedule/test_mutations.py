"""No edit of a schedule passes: over all transfers of all algorithms for small world sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest

from microddp.errors import ScheduleError
from microddp.schedule import OWN, Fold, Recv, Schedule, Send, Step, everyone, only, schedule
from microddp.schedule.ir import Transfer
from tests.schedule.reference import Table, every_schedule, is_right, label, play, schedule_of, table_of

SMALL = [each for n in (2, 3, 4, 5) for each in every_schedule(n, roots=(0, 1))]
Place = tuple[int, int, int]  # rank, step, place among the step's transfers


def places(table: Table) -> Iterator[tuple[Place, Transfer]]:
    for rank, steps in enumerate(table):
        for number, step in enumerate(steps):
            for place, each in enumerate(step.transfers):
                yield (rank, number, place), each


def edited(table: Table, place: Place, *new: Transfer) -> Table:
    """A copy of ``table`` with the transfer at ``place`` replaced by ``new``."""
    rank, number, at = place
    copy = [list(steps) for steps in table]
    step = copy[rank][number]
    copy[rank][number] = replace(step, transfers=(*step.transfers[:at], *new, *step.transfers[at + 1 :]))
    return copy


def pairs(table: Table) -> Iterator[tuple[Place, Place]]:
    """(send, receive) of every message: the k-th ones of an edge belong together."""
    waiting: dict[tuple[int, int], list[Place]] = {}
    for place, each in places(table):
        if isinstance(each, Recv):
            waiting.setdefault((each.peer, place[0]), []).append(place)
    for place, each in places(table):
        if isinstance(each, Send):
            yield place, waiting[place[0], each.peer].pop(0)


def at(table: Table, place: Place) -> Transfer:
    return table[place[0]][place[1]].transfers[place[2]]


def one_end_edits(each: Transfer, rank: int, like: Schedule) -> Iterator[Transfer]:
    """Every other value of each field, legal or not."""
    n = like.world_size
    for peer in range(-1, n + 1):
        if peer != each.peer:
            yield replace(each, peer=peer)
    for chunk in range(-1, like.num_chunks + 1):
        if chunk != each.chunk:
            yield replace(each, chunk=chunk)
    for key in range(-2, n + 1):
        if key != each.key:
            yield replace(each, key=key)
    if isinstance(each, Send):
        yield Recv(each.peer, each.chunk, only(each.peer))
        yield Recv(each.peer, each.chunk, everyone(n), key=n)
        return
    yield Send(each.peer, each.chunk)
    carried = {one for part in each.carries for one in part}
    for one in range(n):  # one more, or one less
        other = carried ^ {one}
        yield replace(each, carries=tuple(range(each, each + 1) for each in sorted(other)))
    yield replace(each, carries=each.carries + each.carries)  # the same set, but twice as many to count
    yield replace(each, carries=(range(n, n + 1),))
    yield replace(each, carries=(range(-1, 0),))


def refused(table: Table, like: Schedule) -> bool:
    try:
        schedule_of(table, like).verify()
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("like", SMALL, ids=label)
def test_editing_or_deleting_one_end_fails(like: Schedule) -> None:
    table, tried = table_of(like), 0
    for place, each in places(table):
        for other in one_end_edits(each, place[0], like):
            assert refused(edited(table, place, other), like), f"{place}: {each} became {other}"
            tried += 1
        assert refused(edited(table, place), like), f"{place}: {each} deleted"
    assert tried >= 8


@pytest.mark.parametrize("like", SMALL, ids=label)
def test_deleting_both_ends_fails(like: Schedule) -> None:
    table = table_of(like)
    for send, receive in pairs(table):
        assert refused(edited(edited(table, send), receive), like), f"{at(table, send)} from rank {send[0]} deleted"


@pytest.mark.parametrize("like", SMALL, ids=label)
def test_delivering_what_is_held_fails(like: Schedule) -> None:
    """The same message twice: in its own step, over the same value or under a fresh key."""
    table, fresh = table_of(like), like.world_size + 1
    for send, receive in pairs(table):
        sent, received = at(table, send), at(table, receive)
        for again in (received, replace(received, key=fresh), replace(received, key=OWN)):
            twice = edited(edited(table, send, sent, sent), receive, received, again)
            assert refused(twice, like), f"{sent} from rank {send[0]} comes twice, then as {again}"


@pytest.mark.parametrize("like", SMALL, ids=label)
def test_delivering_a_result_again_at_the_end_fails(like: Schedule) -> None:
    """Even where the value would be used: it is folded nowhere, but kept under a fresh key and sent on."""
    proof, ended, n = like.verify(), table_of(like), like.world_size
    length = max(map(len, ended))
    for steps in ended:
        steps += [Step()] * (length - len(steps))
    for source, chunk in proof.places():
        for target in range(n):
            if target == source or (target, chunk) not in proof.places():
                continue
            carries = {"all_gather": only(chunk), "broadcast": only(like.root)}.get(like.collective, everyone(n))
            for key in (OWN, n + 1):
                extra = [[*steps, Step(), Step()] for steps in ended]
                extra[source][length] = Step((Send(target, chunk),))
                extra[target][length] = Step((Recv(source, chunk, carries, key=key),))
                with pytest.raises(ScheduleError, match="delivers what is held already"):
                    schedule_of(extra, like).verify()


def test_redirecting_both_ends_fails_or_is_right() -> None:
    """Another receiver or another sender, consistently on both sides: refused, or legal and then right in numbers."""
    legal = 0
    for like in SMALL:
        table = table_of(like)
        for send, receive in pairs(table):
            for other in redirections(table, send, receive):
                if not refused(other, like):
                    assert is_right(schedule_of(other, like)), f"{label(like)}: {at(table, send)} from {send[0]}"
                    legal += 1
    assert legal >= 10  # a chunk that another rank holds by then may come from there as well


def redirections(table: Table, send: Place, receive: Place) -> Iterator[Table]:
    source, target, number = send[0], receive[0], send[1]
    sent, received = at(table, send), at(table, receive)
    assert isinstance(received, Recv)
    for other in range(len(table)):
        if other in (source, target) or number >= len(table[other]):
            continue
        moved = edited(edited(table, send, replace(sent, peer=other)), receive)
        yield added(moved, other, number, received)
        moved = edited(edited(table, send), receive, replace(received, peer=other))
        yield added(moved, other, number, replace(sent, peer=target))


def added(table: Table, rank: int, number: int, each: Transfer) -> Table:
    copy = [list(steps) for steps in table]
    copy[rank][number] = replace(copy[rank][number], transfers=(*copy[rank][number].transfers, each))
    return copy


def test_a_reparented_tree_is_legal() -> None:
    like = schedule("broadcast", 4)
    table = table_of(like)  # rank 3 gets its copy from rank 2, not 1
    table[1][1], table[2][1] = Step(), Step((Send(3, 0),))
    table[3][1] = Step((Recv(2, 0, only(0)),))
    schedule_of(table, like, keep_facts=True).verify()
    assert is_right(schedule_of(table, like))


def fold_edits(step: Step, place: int) -> Iterator[Step]:
    fold = step.folds[place]
    rest = step.folds[:place], step.folds[place + 1 :]
    yield replace(step, folds=rest[0] + rest[1])
    operands = fold.operands
    for number in range(len(operands)):
        yield replace(step, folds=(*rest[0], Fold(fold.chunk, (*operands, operands[number])), *rest[1]))
        yield replace(step, folds=(*rest[0], Fold(fold.chunk, operands[:number] + operands[number + 1 :]), *rest[1]))
    yield replace(step, folds=(*rest[0], fold, fold, *rest[1]))
    yield replace(step, folds=(*rest[0], Fold(fold.chunk + 1, operands), *rest[1]))
    yield replace(step, folds=(*rest[0], Fold(fold.chunk, ()), *rest[1]))


@pytest.mark.parametrize("like", SMALL, ids=label)
def test_editing_a_fold_fails(like: Schedule) -> None:
    """Dropped, repeated, with an operand more or less, or of another chunk."""
    table = table_of(like)
    for rank, steps in enumerate(table):
        for number, step in enumerate(steps):
            for place in range(len(step.folds)):
                for other in fold_edits(step, place):
                    copy = [list(each) for each in table]
                    copy[rank][number] = other
                    assert refused(copy, like), f"rank {rank}, step {number}: {step.folds[place]} became {other.folds}"


def bracketed(left: str, right: str) -> str:
    return f"({left}∘{right})"


def flattened(left: str, right: str) -> str:
    return left + right


def test_permuting_a_fold_is_told_in_the_facts() -> None:
    """Legal, but then the facts follow the new order, and declared facts that no longer hold are refused."""
    changed = 0
    for like in SMALL:
        table = table_of(like)
        for rank, steps in enumerate(table):
            for number, step in enumerate(steps):
                for place, fold in enumerate(step.folds):
                    for operands in list(permutations(fold.operands))[1:]:
                        copy = [list(each) for each in table]
                        folds = (*step.folds[:place], Fold(fold.chunk, operands), *step.folds[place + 1 :])
                        copy[rank][number] = replace(step, folds=folds)
                        changed += check_facts(copy, like)
    assert changed > 100


def check_facts(table: Table, like: Schedule) -> bool:
    """Compares the facts with what the interpreter does to strings; whether they differ from the declared ones."""
    changed = schedule_of(table, like)
    proof = changed.verify()
    n = like.world_size
    texts = play(changed, [f"x{rank}" for rank in range(n)], bracketed)
    results = [(chunk, texts[rank][chunk]) for rank in range(n) for chunk in like.result_chunks(rank)]
    assert proof.same_bits == (len(set(results)) == len({chunk for chunk, _ in results}))
    assert proof.rank_order == all(text == left_fold(n) for _, text in results)
    broken = (like.entry.same_bits and not proof.same_bits) or (like.entry.rank_order and not proof.rank_order)
    if broken:
        with pytest.raises(ScheduleError, match="declared"):
            schedule_of(table, like, keep_facts=True).verify()
    return bool(broken)


def left_fold(world_size: int) -> str:
    text = "x0"
    for rank in range(1, world_size):
        text = bracketed(text, f"x{rank}")
    return text

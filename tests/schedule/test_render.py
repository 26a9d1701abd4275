"""The timetable: golden files, the drawings in the docstrings, and that a schedule costs no memory until asked."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import pytest

from microddp.schedule import Fold, Keep, Recv, Send, Step, only, schedule
from microddp.schedule.render import step_text

GOLDEN = Path(__file__).parents[1] / "golden"

DRAWN = [
    ("naive_4", "naive", 4, None),
    ("tree_7", "tree", 7, None),
    ("ring_4", "ring", 4, None),
    ("full_ring_3", "full_ring", 3, None),
    ("full_ring_rank_order_4", "full_ring", 4, "rank"),
    ("direct_3", "direct", 3, None),
    ("reduce_scatter_3", "reduce_scatter", 3, None),
    ("all_gather_3", "all_gather", 3, None),
    ("broadcast_6", "broadcast", 6, None),
    ("reduce_6", "reduce", 6, None),
    ("ring_1", "ring", 1, None),
]


@pytest.mark.parametrize(("file", "name", "world_size", "order"), DRAWN)
def test_timetable_is_the_golden_one(file: str, name: str, world_size: int, order: str | None) -> None:
    drawn = schedule(name, world_size, order=order).render()
    assert drawn == (GOLDEN / f"{file}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {file for file, *_ in DRAWN}


def rows(text: str) -> list[list[str]]:
    """The words of a timetable's rows, heading included, however they are spaced."""
    words = [line.split() for line in text.splitlines()]
    start = next(number for number, line in enumerate(words) if line[:3] == ["step", "rank", "0"])
    stop = start + 1
    while stop < len(words) and words[stop][:1] == [str(stop - start - 1)]:
        stop += 1
    return words[start:stop]


@pytest.mark.parametrize("name", ["naive", "tree", "ring", "full_ring", "direct"])
def test_docstring_draws_what_render_prints(name: str) -> None:
    docstring = sys.modules[f"microddp.schedule.{name}"].__doc__
    assert docstring is not None
    printed = schedule(name, 3).render()
    assert rows(docstring) == rows(printed) == [line.split() for line in printed.splitlines()[1:]]


def test_every_kind_of_entry_has_a_word() -> None:
    step = Step(
        (Send(1, 2), Send(1, 2, key=5), Recv(3, 0, only(3)), Recv(3, 1, only(3), key=3), Recv(3, 1, only(4), key=4)),
        keeps=(Keep(2, 5),),
        folds=(Fold(1, (3, 4)), Fold(2, (-1, 5))),
    )
    assert step_text(step) == "keep k5 c2->1 c2.k5->1 c0<-3 c1<-3 c1.k4<-3 fold fold"
    assert step_text(Step()) == "."


MANY = 100_000


@pytest.mark.parametrize("rank", [0, 1, 77_777, MANY - 1])
@pytest.mark.parametrize(
    ("name", "order"),
    [("ring", None), ("naive", None), ("tree", None), ("full_ring", None), ("full_ring", "rank"), ("all_gather", None)],
)
def test_steps_of_one_of_many_ranks_cost_no_memory(name: str, order: str | None, rank: int) -> None:
    tracemalloc.start()
    try:
        steps = schedule(name, MANY, order=order).steps(rank)
        taken = 1 if next(steps) is not None else 0
        taken += sum(1 for _, _ in zip(range(3000), steps))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken == (3001 if name != "tree" else 32)
    assert peak < 100_000, f"{peak} bytes"

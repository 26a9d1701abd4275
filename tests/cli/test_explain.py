"""``microddp explain``: its text, its numbers, and that a wrong count or result is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from microddp.cli.explain_bytes import ranks_text
from microddp.schedule import unregister
from microddp.transport.base import Counters, Transfer
from microddp_kernels.launchers import EagerLauncher
from tests.cli.tools import SWAP, WORKED_EXAMPLE, run

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = {
    "explain_full_ring_3.txt": ("full_ring", "--ranks", "3", "--tensor", WORKED_EXAMPLE),
    "explain_tree_7.txt": ("tree", "--ranks", "7"),
    "explain_naive_4.txt": ("naive", "--ranks", "4"),
}

pytestmark = pytest.mark.timeout(60)


def explain_json(*argv: str) -> dict[str, Any]:
    done = run("explain", *argv, "--json")
    assert done.status == 0, done.err
    found: dict[str, Any] = done.json
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_is_as_pinned(name: str) -> None:
    done = run("explain", *EXAMPLES[name])
    assert done.out == (GOLDEN / name).read_text("utf-8")
    assert (done.status, done.err) == (0, "")


def test_worked_example_alternates_between_two_slots() -> None:
    """Every rank forwards whole tensors: what it adds in step s is rank - 1 - s's own."""
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    found = explain_json(*EXAMPLES["explain_full_ring_3.txt"])
    start, *steps = found["steps"]
    assert [each["data"] for each in start["ranks"]] == rows
    total = rows
    for number, step in enumerate(steps):
        sends, receives = ("A", "B") if number % 2 == 0 else ("B", "A")
        total = [[a + b for a, b in zip(total[rank], rows[rank - 1 - number])] for rank in range(3)]
        for rank, each in enumerate(step["ranks"]):
            assert (each["sent_from"], each["received_into"]) == ([sends], [receives])
            assert each["slots"] == {sends: rows[rank - number], receives: rows[rank - 1 - number]}
            assert each["data"] == total[rank]
    assert total == [[12, 15, 18]] * 3


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("tree", "--ranks", "7"), [4, 6, 6, 2, 2, 2, 2]),
        (("naive", "--ranks", "4"), [6, 2, 2, 2]),
        (("full_ring", "--ranks", "4"), [6, 6, 6, 6]),
        (("ring", "--ranks", "4"), [3, 3, 3, 3]),
        (("direct", "--ranks", "4"), [3, 3, 3, 3]),
        (("all_gather", "--ranks", "4"), [1.5] * 4),
        (("reduce_scatter", "--ranks", "4"), [1.5] * 4),
        (("broadcast", "--ranks", "7", "--root", "2"), [1, 1, 2, 3, 3, 1, 1]),
        (("reduce", "--ranks", "7", "--root", "2"), [1, 1, 2, 3, 3, 1, 1]),
    ],
)
def test_bytes_in_all_are_these_multiples_of_the_tensor(argv: tuple[str, ...], expected: list[float]) -> None:
    found = explain_json(*argv)
    counted = [(each["sent"] + each["received"]) / found["nbytes"] for each in found["bytes"]]
    assert counted == expected
    assert [each["formula"]["both"]["nbytes"] / found["nbytes"] for each in found["bytes"]] == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int64", "uint8", "bool"])
@pytest.mark.parametrize("algorithm", ["naive", "tree", "ring", "full_ring", "direct"])
def test_every_rank_ends_with_the_sum(algorithm: str, dtype: str) -> None:
    rows = [[rank + place for place in range(9)] for rank in range(5)]
    if dtype == "bool":
        rows = [[value % 2 for value in row] for row in rows]
    text = ";".join(",".join(map(str, row)) for row in rows)
    found = explain_json(algorithm, "--ranks", "5", "--tensor", text, "--dtype", dtype)
    totals = [bool(sum(column)) if dtype == "bool" else sum(column) for column in zip(*rows)]
    assert [each["data"] for each in found["steps"][-1]["ranks"]] == [totals] * 5


@pytest.mark.parametrize("world_size", [1, 2, 3, 9, 20])
@pytest.mark.parametrize("algorithm", ["tree", "ring", "direct", "reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_any_number_of_ranks_is_right_and_readable(algorithm: str, world_size: int) -> None:
    done = run("explain", algorithm, "--ranks", str(world_size))
    assert (done.status, done.err) == (0, "")
    assert "MISMATCH" not in done.out
    assert len(done.out.splitlines()) < 140
    is_cut = world_size > 8
    assert ("--full shows all" in done.out) == is_cut
    if is_cut:
        assert f"Left out: ranks 3-{world_size - 4}" in done.out
        assert len(run("explain", algorithm, "--ranks", str(world_size), "--full").out) > len(done.out)


def test_json_and_text_agree() -> None:
    found, text = explain_json("tree", "--ranks", "3"), run("explain", "tree", "--ranks", "3").out
    assert "\n".join(found["timetable"][1:]) in text
    assert f"S = {found['nbytes']} bytes" in text
    for each in found["bytes"]:
        assert f"{each['sent']} | {each['formula']['sent']['text']} = {each['sent']}" in text
    assert found["proof"]["orders"][0]["order"].replace("∘", "+") in text


def test_a_users_algorithm_is_explained_without_a_formula(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SWAP)
    try:
        done = run("explain", "swap", "--ranks", "2", "--load", str(tmp_path / "mine.py"))
        assert "16 | 16 by its schedule" in done.out and done.status == 0
    finally:
        unregister("swap")


def test_bytes_that_the_transport_counts_otherwise_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Counters.count

    def count(self: Counters, transfer: Transfer) -> None:
        original(self, transfer)
        self.bytes_sent += transfer.peer == 1

    monkeypatch.setattr(Counters, "count", count)
    done = run("explain", "tree", "--ranks", "3")
    assert (done.status, done.out.count("MISMATCH")) == (1, 1)
    assert "see MISMATCH" in done.err and done.err.count("\n") == 1


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerLauncher.combine

    def combine(self: EagerLauncher, out: torch.Tensor, *args: Any) -> None:
        original(self, out, *args)
        out[0] += 1

    monkeypatch.setattr(EagerLauncher, "combine", combine)
    done = run("explain", "ring", "--ranks", "3")
    assert done.status == 1
    assert "against NumPy: MISMATCH" in done.out
    assert "MISMATCH: rank 0, chunk 0: element 0 is 113.0, not 111.0" in done.out


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_runs_of_ranks(numbers: list[int], text: str) -> None:
    assert ranks_text(numbers) == text

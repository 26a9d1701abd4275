"""``microddp demo``: what it shows is true, and each of its checks can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microddp
from microddp import Communicator
from microddp.cli.demo_training import CORRUPTION
from microddp.transport.base import Counters, Transfer
from tests.cli.tools import CONTROL, Outcome, run, run_process

pytest.importorskip("sklearn")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The demo's ranks as threads of this process, so that a test can spoil what they do."""
    monkeypatch.setattr(microddp, "run_processes", microddp.run_threads)
    return monkeypatch


def rows_by_name(done: Outcome) -> dict[tuple[str, str | None], dict[str, Any]]:
    return {(row["algorithm"], row["order"]): row for row in done.json["algorithms"]}


def test_everything_holds(on_threads: pytest.MonkeyPatch) -> None:
    done = run("demo", "--ranks", "3", "--json")
    assert (done.status, done.err) == (0, "")
    found = done.json
    assert found["ok"] and found["failures"] == []
    assert len(found["epochs"]) == 12
    assert found["epochs"][-1]["accuracy"] >= 0.95 and found["epochs"][-1]["loss"] < found["epochs"][0]["loss"]
    assert [check["passed"] for check in found["checks"]] == [True] * 3
    size, rows = found["nbytes"], rows_by_name(done)
    assert size % (16 * 3) == 0
    sent = {name: [part["sent"] / size for part in row["bytes"]] for name, row in rows.items()}
    assert sent == {
        ("naive", None): [2, 1],
        ("tree", None): [2, 1],
        ("ring", None): [4 / 3],
        ("full_ring", None): [2],
        ("full_ring", "rank"): [2],
        ("direct", None): [4 / 3],
    }
    assert {name: row["steps"] for name, row in rows.items()} == {
        ("naive", None): 4,
        ("tree", None): 2,
        ("ring", None): 4,
        ("full_ring", None): 2,
        ("full_ring", "rank"): 2,
        ("direct", None): 2,
    }
    assert [name for name, row in rows.items() if not row["same_bits"]] == [("full_ring", None)]
    assert all(0 < row["error"] < 1e-6 and row["error_over_bound"] <= 1 and row["time_ms"] > 0 for row in rows.values())


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("world_size", [1, 4])
def test_other_seeds_and_world_sizes(world_size: int, seed: int, on_threads: pytest.MonkeyPatch) -> None:
    done = run("demo", "--ranks", str(world_size), "--seed", str(seed))
    assert (done.status, done.err) == (0, "")
    assert "All checks passed" in done.out
    assert ("full_ring adds in the order of arrival" in done.out) == (world_size > 2)
    assert not CONTROL.search(done.out)


def test_processes_print_as_they_train() -> None:
    done = run_process("demo", "--ranks", "2", "--epochs", "2")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    start = lines.index("epoch      loss  accuracy (test)")
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["1", "2"]
    assert "not checked before epoch 12" in done.out
    assert "2 processes over Gloo" in lines[0]
    assert not CONTROL.search(done.out)
    table = [line for line in lines if line.startswith(("naive", "tree", "ring", "full_ring", "in rank", "direct"))]
    assert len(table) == 6 and all(line.endswith("OK") and len(line) <= 80 for line in table)


def test_a_gradient_that_is_spoilt_on_one_process_is_seen() -> None:
    done = run_process("demo", "--ranks", "2", "--epochs", "1", "--corrupt", "1", "--json")
    assert done.status == 1
    assert not done.json["ok"]
    same_bits = next(check for check in done.json["checks"] if "same bits" in check["name"])
    assert (same_bits["passed"], same_bits["seen"]) == (False, "rank 1 differs from rank 0")
    assert "microddp demo: failed: parameters have the same bits on every rank: rank 1" in done.err


def test_full_ring_as_it_arrives_is_seen_to_pull_replicas_apart(on_threads: pytest.MonkeyPatch) -> None:
    done = run("demo", "--ranks", "3", "--epochs", "1", "--algorithm", "full_ring")
    assert done.status == 1
    assert "parameters have the same bits on every rank: rank 1, 2 differ from rank 0" in done.err
    in_order = ("--algorithm", "full_ring", "--order", "rank")
    assert run("demo", "--ranks", "3", "--epochs", "1", *in_order).status == 0


def test_parameters_that_are_equal_but_wrong_are_seen(on_threads: pytest.MonkeyPatch) -> None:
    spoil_all_reduce(on_threads, "ring", ranks=(0, 1), error=CORRUPTION)
    done = run("demo", "--ranks", "2", "--epochs", "1")
    assert done.status == 1
    assert "parameters are within 1e-05 of training alone" in done.err
    assert "same bits" not in done.err
    assert "failed: ring: an error is" in done.err


def test_bits_that_differ_where_equal_ones_are_promised_are_seen(on_threads: pytest.MonkeyPatch) -> None:
    spoil_all_reduce(on_threads, "tree", ranks=(1,), error=None)
    done = run("demo", "--ranks", "2", "--epochs", "1")
    assert (done.status, done.err) == (1, "microddp demo: failed: tree: the ranks' results differ in their bits\n")
    assert done.out.count("MISMATCH") == 1 and "1 check failed" in done.out


def test_bytes_that_are_not_the_formulas_are_seen(on_threads: pytest.MonkeyPatch) -> None:
    original = Counters.count

    def count(self: Counters, transfer: Transfer) -> None:
        original(self, transfer)
        self.bytes_received += transfer.nbytes > 15_000

    on_threads.setattr(Counters, "count", count)
    done = run("demo", "--ranks", "2", "--epochs", "1")
    assert done.status == 1
    failed = {line.split(":")[2].strip() for line in done.err.splitlines()}
    assert failed == {"naive", "tree", "full_ring", "full_ring in rank order"}


def spoil_all_reduce(patch: pytest.MonkeyPatch, algorithm: str, ranks: tuple[int, ...], error: float | None) -> None:
    """Adds ``error``, or a unit in the last place, to the largest element that ``algorithm`` leaves on ``ranks``."""
    original = Communicator.all_reduce

    def spoil(self: Communicator, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        result: Any = original(self, x, *args, **options)
        if options.get("algorithm") == algorithm and self.rank in ranks:
            place = int(result.abs().argmax())
            following = torch.nextafter(result[place], torch.tensor(0.0))
            result[place] = following if error is None else result[place] + error
        return result

    patch.setattr(Communicator, "all_reduce", spoil)

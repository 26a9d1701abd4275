"""``microddp bench``: its figures are plausible, its check is exact and independent, and sees what is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from microddp import Communicator
from microddp.cli.bench_data import contribution, expected, num_wrong
from microddp.schedule import unregister
from microddp.transport.base import Exchange
from microddp.transport.thread import ThreadTransport
from tests.cli.tools import SWAP, run, run_process

pytestmark = pytest.mark.timeout(120)

THREADS = ("bench", "--ranks", "2", "--transport", "thread", "--warmup", "1", "--iters", "3")


def check_rows(found: dict[str, Any], world_size: int, sizes: list[int], algorithms: list[str]) -> None:
    rows = found["rows"]
    assert [(row["algorithm"], row["size"]) for row in rows] == [(name, size) for name in algorithms for size in sizes]
    for row in rows:
        assert row["count"] * 4 == row["size"]
        for measured in (row["out_of_place"], row["in_place"]):
            assert measured["wrong"] == 0
            assert 0 < measured["time_us"] < 5e6
            assert measured["algbw"] == pytest.approx(row["size"] / measured["time_us"] / 1e3)
            assert measured["busbw"] == pytest.approx(measured["algbw"] * 2 * (world_size - 1) / world_size)
    assert found["ok"] is True


def test_threads() -> None:
    done = run(*THREADS, "--sizes", "16,4K,100000", "--algorithms", "ring,full_ring,auto", "--json")
    assert (done.status, done.err) == (0, "")
    check_rows(done.json, 2, [16, 4096, 100000], ["ring", "full_ring", "auto"])
    assert all(row["chosen"] in ("tree", "ring", "direct") for row in done.json["rows"] if row["algorithm"] == "auto")


def test_processes_over_gloo() -> None:
    done = run("bench", "--ranks", "2", "--sizes", "4K,1M", "--algorithms", "direct", "--iters", "3", "--json")
    assert (done.status, done.err) == (0, "")
    check_rows(done.json, 2, [4096, 1 << 20], ["direct"])
    assert (done.json["transport"], done.json["ranks"]) == ("gloo", 2)
    assert done.json["threads_per_rank"] >= 1


def test_ranks_of_torchrun_print_one_document(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SWAP)
    argv = ("bench", "--sizes", "4K", "--algorithms", "swap", "--load", str(tmp_path / "mine.py"), "--json")
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "microddp")
    done = run_process(*argv, module=launch)
    assert done.status == 0, done.err
    check_rows(done.json, 2, [4096], ["swap"])


def test_ranks_that_do_not_fit_torchruns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = run("bench", "--ranks", "2")
    assert (done.status, done.out) == (2, "")
    assert "--ranks 2 does not fit the 3 ranks" in done.err
    monkeypatch.setenv("RANK", "1")
    assert run("bench", "--ranks", "2").err == ""


def test_one_rank_divides_by_nothing() -> None:
    done = run("bench", "--ranks", "1", "--transport", "thread", "--sizes", "0,4K", "--algorithms", "ring", "--json")
    assert done.status == 0
    assert [row["in_place"]["busbw"] for row in done.json["rows"]] == [0, 0]


@pytest.mark.parametrize("width", [80, 120])
def test_table_has_the_columns_of_nccl_tests(width: int) -> None:
    done = run(*THREADS, "--sizes", "4K", "--algorithms", "tree", width=width)
    header = done.out[done.out.index("\ntree\n") :]
    for name in ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "out", "in"):
        assert name in header
    assert header.count("4096") == (1 if width == 120 else 2)


@pytest.mark.parametrize("place", ["out_of_place", "in_place"])
def test_wrong_elements_are_counted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Communicator.all_reduce

    def spoil(self: Communicator, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        result: Any = original(self, x, *args, **options)
        is_place = (options.get("out") is not None) is (place == "out_of_place")
        if x.dtype == torch.float32 and self.rank == 1 and is_place:
            result[7] += 2.0**-20
            result[9] = float("nan")
        return result

    monkeypatch.setattr(Communicator, "all_reduce", spoil)
    done = run(*THREADS, "--sizes", "4K", "--algorithms", "ring", "--json")
    assert done.status == 1
    assert done.err == "microddp bench: 2 elements wrong\n"
    wrong = {name: done.json["rows"][0][name]["wrong"] for name in ("out_of_place", "in_place")}
    assert wrong == {"out_of_place": 0, "in_place": 0, place: 2}


def test_a_call_that_does_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Communicator.all_reduce

    def skip(self: Communicator, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return x if x.dtype == torch.int32 else original(self, x, *args, **options)

    monkeypatch.setattr(Communicator, "all_reduce", skip)
    done = run(*THREADS, "--sizes", "4K", "--algorithms", "ring", "--dtype", "int32", "--json")
    assert done.status == 1
    assert done.json["rows"][0]["out_of_place"]["wrong"] == 2 * 1024  # the target holds what it was spoilt with
    assert done.json["rows"][0]["in_place"]["wrong"] > 1000


def test_a_slow_transport_shows_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is the whole call, not its launch: 5 ms a message, two messages one after the other."""
    original = ThreadTransport.open

    class Slow(Exchange):
        def __init__(self, inner: Exchange) -> None:
            self.inner = inner

        def post(self, group: Any) -> Any:
            time.sleep(0.005)  # not to synchronise: the delay is what is measured
            return self.inner.post(group)

        def wait(self, events: Any) -> None:
            self.inner.wait(events)

        def finish(self) -> None:
            self.inner.finish()

    def open_slow(self: ThreadTransport, *args: Any) -> Exchange:
        return Slow(original(self, *args))

    monkeypatch.setattr(ThreadTransport, "open", open_slow)
    done = run(*THREADS, "--sizes", "4K", "--algorithms", "ring", "--json")
    assert all(done.json["rows"][0][place]["time_us"] >= 10_000 for place in ("out_of_place", "in_place"))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, dtype) for op in ("sum", "prod", "min", "max") for dtype in ("float16", "bfloat16", "int8", "bool")),
        *(("avg", dtype) for dtype in ("bfloat16", "float32", "float64")),
        *((op, dtype) for op in ("band", "bor", "bxor") for dtype in ("uint8", "int64", "bool")),
    ],
)
def test_every_operator_has_an_exact_check(op: str, dtype: str) -> None:
    argv = ("--sizes", "4000", "--algorithms", "tree,ring,direct,full_ring", "--op", op, "--dtype", dtype)
    done = run("bench", "--ranks", "5", "--transport", "thread", "--warmup", "0", "--iters", "1", *argv, "--json")
    assert done.status == 0, done.err


def test_the_check_adds_up_what_each_rank_brings() -> None:
    parts = [contribution(rank, 5000, torch.int64, "sum") for rank in range(3)]
    want = expected(3, 5000, torch.int64, "sum")
    assert want.tolist() == [sum(column) for column in zip(*(part.tolist() for part in parts))]
    assert num_wrong(parts[0] + parts[1] + parts[2], want) == 0
    assert num_wrong(parts[0] + parts[1] + parts[1], want) > 2000


@pytest.fixture(autouse=True)
def _forget_swap() -> Any:
    yield
    try:
        unregister("swap")
    except ValueError:
        return

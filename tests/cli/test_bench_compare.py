"""``microddp bench --compare``: torch's own all_reduce in the same iterations, and what is refused."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import microddp
from microddp.cli import bench_measure
from microddp.cli.bench_compare import check_gpus
from microddp.cli.bench_measure import BenchPlan, Measurement, Row, measure_all
from microddp.cli.usage import UsageError
from tests.cli.tools import run

pytestmark = pytest.mark.timeout(60)

SMALL = ("--sizes", "4K", "--warmup", "1", "--iters", "3")


@pytest.fixture
def one_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of this process alone, so that what is patched here is what runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)


def test_gloo_between_processes() -> None:
    argv = ("--ranks", "2", "--algorithms", "ring,auto", "--sizes", "4K,100K", "--iters", "3", "--dtype", "bfloat16")
    done = run("bench", "--compare", "gloo", *argv, "--json")
    assert (done.status, done.err) == (0, "")
    assert (done.json["compare"], done.json["transport"], done.json["ok"]) == ("gloo", "gloo", True)
    assert len(done.json["rows"]) == 4
    for row in done.json["rows"]:
        compared = row["compared"]
        assert compared["wrong"] == 0
        assert compared["algbw"] == pytest.approx(row["size"] / compared["time_us"] / 1e3)
        assert row["ratio"] == pytest.approx(compared["time_us"] / row["in_place"]["time_us"])


@pytest.mark.usefixtures("one_rank_of_torchrun")
def test_what_torch_takes_is_in_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dist.all_reduce

    def slow(*args: Any) -> Any:
        time.sleep(0.02)  # not to synchronise: the delay is what is measured
        return original(*args)

    monkeypatch.setattr(dist, "all_reduce", slow)
    (row,) = run("bench", "--compare", "gloo", *SMALL, "--algorithms", "ring", "--json").json["rows"]
    assert row["compared"]["time_us"] >= 20_000 > row["in_place"]["time_us"]
    assert row["ratio"] > 1


@pytest.mark.usefixtures("one_rank_of_torchrun")
def test_wrong_elements_of_torch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: tensor[:3].add_(1))
    done = run("bench", "--compare", "gloo", *SMALL, "--algorithms", "ring", "--json")
    assert (done.status, done.err) == (1, "microddp bench: 3 elements wrong\n")
    assert [done.json["rows"][0][name]["wrong"] for name in ("out_of_place", "in_place", "compared")] == [0, 0, 3]


@pytest.mark.usefixtures("one_rank_of_torchrun")
def test_types_that_torch_does_not_reduce_are_named_and_nothing_stays_open() -> None:
    done = run("bench", "--compare", "gloo", *SMALL, "--dtype", "int16")
    assert (done.status, done.out) == (2, "")
    assert "--compare gloo: torch's gloo does not reduce int16 by 'sum': " in done.err
    assert not dist.is_initialized()


@pytest.mark.usefixtures("one_rank_of_torchrun")
@pytest.mark.parametrize("width", [80, 160])
def test_table_has_the_ratio(width: int) -> None:
    done = run("bench", "--compare", "gloo", *SMALL, "--algorithms", "ring", width=width)
    lines = done.out[done.out.index("\nring\n") :].splitlines()
    assert "vs gloo" in "".join(lines)
    ratios = [line.split()[-1] for line in lines if line.split()[:1] == ["4096"]]
    assert "." in ratios[-1]
    assert float(ratios[-1]) > 0


def test_ways_alternate_and_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every iteration does each way once; on a GPU a call is over when the device is done."""
    seen: list[str] = []
    original = microddp.Communicator.all_reduce

    def note(self: Any, x: torch.Tensor, **options: Any) -> Any:
        if x.dtype == torch.float32:
            seen.append("out" if options.get("out") is not None else "in")
        return original(self, x, **options)

    monkeypatch.setattr(microddp.Communicator, "all_reduce", note)
    monkeypatch.setattr(bench_measure, "_settle", lambda device: seen.append("settle"))
    plan = BenchPlan(("ring",), (64,), "float32", "sum", None, 1, 2, None)
    microddp.run_threads(measure_all, 1, args=(plan,))
    assert seen == ["settle", "out", "settle", "settle", "in", "settle"] * 3
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(str(device)))
    for device in ("cpu", "cuda:1"):
        bench_measure._settle(torch.device(device))
    assert seen[-2:] == ["settle", "cuda:1"]


def test_auto_names_what_it_chose_for_that_size() -> None:
    """Not for the few bytes of the benchmark's own sums of times."""
    sizes = (4096, 1 << 24)
    plan = BenchPlan(("auto",), sizes, "float32", "sum", None, 0, 1, None)
    rows, _ = microddp.run_threads(measure_all, 4, args=(plan,))[0]
    chosen = microddp.run_threads(_choices, 4, args=(sizes,))[0]
    assert chosen[0] != chosen[1], "the sizes show nothing if one algorithm is chosen for both"
    assert [row.chosen for row in rows] == chosen


def _choices(comm: microddp.Communicator, sizes: tuple[int, ...]) -> list[str]:
    found = []
    for size in sizes:
        comm.all_reduce(torch.zeros(size // 4))
        assert comm.last_choice is not None
        found.append(comm.last_choice.algorithm)
    return found


def test_ratio_of_nothing() -> None:
    none, some = Measurement(0, 0, 0, 0), Measurement(6, 0, 0, 0)
    assert Row("ring", "ring", 0, 0, "float32", "sum", some, none, some).ratio is None
    assert Row("ring", "ring", 0, 0, "float32", "sum", some, some).ratio is None
    assert Row("ring", "ring", 0, 0, "float32", "sum", none, Measurement(3, 0, 0, 0), some).ratio == 2
    assert "compared" not in Row("ring", "ring", 0, 0, "float32", "sum", some, some).as_json()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--compare", "gloo", "--transport", "thread"), "--compare gloo goes with --transport gloo, not thread"),
        (("--compare", "gloo", "--transport", "nccl"), "--compare gloo goes with --transport gloo, not nccl"),
        (("--compare", "nccl", "--transport", "gloo"), "--compare nccl goes with --transport nccl, not gloo"),
        (("--compare", "gloo", "--op", "avg"), "torch's gloo has no 'avg' to compare with; it has sum, "),
        (("--compare", "gloo", "--op", "absmax"), "--op absmax: results are checked for sum"),
    ],
)
def test_what_cannot_be_compared_is_refused(argv: tuple[str, ...], text: str) -> None:
    done = run("bench", *argv)
    assert (done.status, done.out) == (2, "")
    assert text in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "argv", [("--compare", "nccl"), ("--transport", "nccl"), ("--compare", "nccl", "--ranks", "2")]
)
def test_without_a_gpu_it_says_what_is_missing(argv: tuple[str, ...]) -> None:
    done = run("bench", *argv)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("microddp bench: error: torch ")
    assert "CUDA" in done.err
    assert done.err.count("\n") == 1


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("microddp.transport.nccl_api.load_nccl", lambda: None)
    assert check_gpus(None) == check_gpus(2) == 2
    with pytest.raises(UsageError, match="--ranks 3: over nccl each rank needs a GPU of its own, and there are 2"):
        check_gpus(3)

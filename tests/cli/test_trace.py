"""``microddp trace``: the file is a trace of every rank, the figures are its own, bad usage is one clear line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from microddp import tracing
from tests.cli.tools import SWAP, run
from tests.tracing_tools import read_trace

pytestmark = pytest.mark.timeout(60)

SMALL = ("--ranks", "2", "--transport", "thread")


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert document["displayTimeUnit"] in ("ms", "ns")
    return document


def figures(text: str) -> list[list[str]]:
    """The rows of the table."""
    return [line.split() for line in text.splitlines() if re.match(r"\s+\d+ ", line)]


def test_processes_over_gloo(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = run("trace", str(out), "--ranks", "2", "--size", "64K", "--slices", "4", "--dtype", "float32")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0] == (
        "ring on 2 processes over gloo: 65536 bytes of float32, sum, slices of 8192 bytes"
    )
    document = load(out)
    found = read_trace(document["traceEvents"])
    assert list(found) == ["rank 0", "rank 1"]
    for rows in found.values():
        combines = [each["name"] for each in rows["combines"]]
        assert combines == ["combine sum"] * 4
        assert rows["host"][0]["name"] == "microddp/all_reduce ring n=2 64KiB fp32"
        assert all(each["name"].startswith(("microddp/all_reduce", "wait ")) for each in rows["host"])
    arrows = [each for each in document["traceEvents"] if each["ph"] == "s"]
    assert len(arrows) == 2 * 2 * 4  # ranks, steps, slices
    rows_shown = figures(done.out)
    assert [row[0] for row in rows_shown] == ["0", "1"]
    for row, rows in zip(rows_shown, found.values()):
        assert float(row[1]) == pytest.approx(rows["host"][0]["dur"], abs=1)
        assert float(row[3]) == pytest.approx(sum(each["dur"] for each in rows["combines"]), abs=1)
        assert int(row[4]) == sum(len(each) for name, each in rows.items() if name.startswith("transfers"))
        assert 0 <= int(row[5].removesuffix("%")) <= 100
    num_ranges = sum(len(row) for rows in found.values() for row in rows.values())
    assert f"Wrote {out}, {num_ranges} ranges." in done.out
    assert document["otherData"]["ranks"] == 2


@pytest.mark.parametrize("options", ["--algorithm naive", "--algorithm full_ring --order rank --op max", "--size 0"])
def test_threads(tmp_path: Path, options: str) -> None:
    out = tmp_path / "trace.json"
    done = run("trace", str(out), *SMALL, "--dtype", "int32", *options.split())
    assert (done.status, done.err) == (0, "")
    found = read_trace(load(out)["traceEvents"])
    assert list(found) == ["rank 0", "rank 1"]
    assert len([each for row in found["rank 0"].values() for each in row if "microddp/" in each["name"]]) == 1
    assert tracing.current() is None


def test_an_algorithm_of_the_user(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(SWAP)
    out = tmp_path / "trace.json"
    done = run("trace", str(out), *SMALL, "--load", str(source), "--algorithm", "swap", "--size", "64")
    assert (done.status, done.err) == (0, "")
    text = out.read_text("utf-8")
    assert "reduce step 1/1 slice 1/1" in text and "→" in text


BAD = [
    ("OUT --size 4Q", "--size: '4Q' is not a number of bytes"),
    ("OUT --size 1K,2K", "--size: '1K,2K' is not a number of bytes"),
    ("OUT --algorithm rong", "unknown algorithm 'rong' for all_reduce; known: naive, tree, ring"),
    ("OUT --algorithm all_gather", "unknown algorithm 'all_gather' for all_reduce"),
    ("OUT --order rank", "'ring' does not combine in rank order"),
    ("OUT --op plus", "unknown operator 'plus'"),
    ("OUT --op argmax", "--op argmax reduces 2 tensors together"),
    ("OUT --op avg --dtype int32", "operator 'avg' is not defined on int32"),
    ("OUT --dtype float31", "unknown dtype 'float31'"),
    ("OUT --ranks 0", "0 is not an integer from 1 to 64"),
    ("OUT --slices 0", "0 is not an integer from 1 to 4096"),
    ("OUT --transport nccl", "invalid choice: 'nccl'"),
    ("OUT --load nowhere.py", "--load nowhere.py: FileNotFoundError: no such file"),
    ("/no/such/directory/t.json", "OUT: there is no directory /no/such/directory"),
    (".", "OUT: . is a directory, not a file"),
    ("", "OUT"),
]


@pytest.mark.parametrize(("line", "text"), BAD)
def test_bad_usage(line: str, text: str, tmp_path: Path) -> None:
    done = run("trace", *line.replace("OUT", str(tmp_path / "t.json")).split())
    assert (done.status, done.out) == (2, "")
    assert text in done.err.splitlines()[-1]
    assert not (tmp_path / "t.json").exists()


def test_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("trace", str(tmp_path / "t.json"))
    assert (done.status, done.out) == (2, "")
    assert done.err == "microddp trace: error: it starts its ranks itself: call it without torchrun\n"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    out = Path("/dev/full")
    if not out.exists():
        pytest.skip("this system has no /dev/full")
    done = run("trace", str(out), *SMALL, "--size", "64")
    assert (done.status, done.out) == (1, "")
    assert done.err == "microddp trace: error: cannot write /dev/full: No space left on device\n"

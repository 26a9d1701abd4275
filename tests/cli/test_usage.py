"""Bad usage is one clear line and status 2; output is plain where no person looks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from microddp.cli.output import Progress
from microddp.cli.usage import UsageError, parse_sizes
from tests.cli.tools import CONTROL, WORKED_EXAMPLE, Pipe, run, streams

pytestmark = pytest.mark.timeout(60)

ALGORITHMS = "naive, reduce, broadcast, tree, ring, reduce_scatter, all_gather, full_ring, direct"
BAD = [
    ("", "COMMAND"),
    ("exlpain ring", "invalid choice: 'exlpain'"),
    ("explain ring", "--ranks"),
    ("explain ring --ranks 0", "0 is not an integer from 1 to 256"),
    ("explain ring --ranks two", "'two' is not an integer"),
    ("explain rings --ranks 3", f"unknown algorithm 'rings'; known: {ALGORITHMS}"),
    ("explain ring --ranks 3 --op plus", "unknown operator 'plus'; known operators: sum, prod"),
    ("explain ring --ranks 3 --op avg --dtype int32", "operator 'avg' is not defined on int32"),
    ("explain ring --ranks 3 --dtype float31", "unknown dtype 'float31'; known: float32"),
    ("explain ring --ranks 3 --order rank", "'ring' does not combine in rank order"),
    ("explain broadcast --ranks 3 --root 3", "root 3 is not one of 3 ranks"),
    ("explain ring --ranks 3 --root 1", "has no root"),
    ("explain ring --ranks 3 --tensor 1,2;3,4", "--tensor has 2 rows for 3 ranks"),
    ("explain ring --ranks 2 --tensor 1,2;3", "row 1 has 1 number, row 0 has 2"),
    ("explain ring --ranks 2 --tensor 1,2;3,x", "row 1, column 1: 'x' is not a number"),
    ("explain ring --ranks 2 --tensor 1;2.5 --dtype int32", "row 1, column 0: '2.5' is not an integer"),
    ("explain ring --ranks 2 --tensor 1;300 --dtype uint8", "300 is not in 0..255, the range of uint8"),
    ("explain ring --ranks 2 --tensor ;", "--tensor has 1 row for 2 ranks"),
    ("explain reduce_scatter --ranks 2 --tensor 1,2,3;4,5,6", "3 numbers a rank do not divide by 2 ranks"),
    ("explain ring --ranks 2 --load nowhere.py", "--load nowhere.py: FileNotFoundError: no such file"),
    ("explain ring --ranks 2 --load no.such.module", "--load no.such.module: ModuleNotFoundError"),
    ("bench --sizes 4Q", "'4Q' is not a number of bytes"),
    ("bench --algorithms ring,rong", "unknown algorithm 'rong' for all_reduce; known: naive, tree, ring"),
    ("bench --op avg --dtype float16", "no exact check is known for avg of float16"),
    ("bench --op argmax", "--op argmax: results are checked for sum, avg, prod, min, max, band, bor, bxor only"),
    ("bench --op absmax", "--op absmax: results are checked for sum"),
    ("bench --iters 0", "0 is not an integer from 1 on"),
    ("demo --corrupt 4", "--corrupt 4 is not one of 4 ranks"),
    ("demo --algorithm broadcast", "unknown algorithm 'broadcast' for all_reduce"),
]


@pytest.mark.parametrize(("line", "text"), BAD)
def test_bad_usage(line: str, text: str) -> None:
    done = run(*line.split())
    assert (done.status, done.out) == (2, "")
    assert text in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_version_and_help() -> None:
    assert run("--version").out.startswith("microddp ")
    for command in ("demo", "explain", "bench"):
        done = run(command, "--help")
        assert done.status == 0 and f"usage: microddp {command}" in done.out


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K", [4096]),
        ("0,16, 1M,1G", [0, 16, 1 << 20, 1 << 30]),
        ("4K:64K:x4", [4096, 16384, 65536]),
        ("4K:60K:x4", [4096, 16384]),
        ("1K:4K", [1024, 2048, 4096]),
        ("1KiB:3kb:+1K", [1024, 2048, 3072]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "-4", "4K:1K", "1:2:3:4", "1:8:x1", "0:8:x2", "1:8:+0", "1:1M:+1", "1:2:y2"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--sizes"):
        parse_sizes(text)


EXAMPLES = [
    ("explain", "full_ring", "--ranks", "3", "--tensor", WORKED_EXAMPLE),
    ("explain", "tree", "--ranks", "7"),
    ("explain", "naive", "--ranks", "4"),
    ("explain", "ring", "--ranks", "4"),
    ("explain", "all_gather", "--ranks", "20"),
    (
        "bench",
        "--ranks",
        "1",
        "--transport",
        "thread",
        "--sizes",
        "0,4M",
        "--iters",
        "1",
        "--algorithms",
        "direct,auto",
    ),
]


@pytest.mark.parametrize("argv", EXAMPLES, ids=lambda argv: argv[1])
def test_piped_output_is_plain_text_that_fits(argv: tuple[str, ...]) -> None:
    wide, narrow = run(*argv, width=120).out, run(*argv, width=80).out
    for text, width in ((wide, 120), (narrow, 90)):
        assert not CONTROL.search(text)
        assert max(map(len, text.splitlines())) <= width
        assert not any(line.endswith((" ", "…")) for line in text.splitlines())


def test_colour_only_on_a_terminal_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    argv = EXAMPLES[2]
    coloured = run(*argv, is_terminal=True).out
    assert "\x1b[32m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(f"\x1b[3{digit}m" in run(*argv, is_terminal=True).out for digit in range(8))


def test_ascii_where_the_stream_has_no_more() -> None:
    done = run("explain", "tree", "--ranks", "3", "--op", "max", encoding="ascii")
    assert done.status == 0 and done.out.isascii()
    assert "(x0*x1*x2)" in done.out and "─" not in done.out


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    saved = sys.stdout
    sys.stdout = stream
    try:
        from microddp.cli import main

        status = main(["explain", "tree", "--ranks", "3"])
    finally:
        sys.stdout = saved
        stream.close()
    assert status == 0


def test_progress_is_silent_at_first_and_then_says_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("microddp.cli.output.time.monotonic", lambda: clock[0])
    err = Pipe()
    with streams(Pipe(), err), Progress("bench", 9) as progress:
        for seconds in (0.0, 1.9, 0.2, 1.0, 4.5):
            clock[0] += seconds
            progress.step(f"at {clock[0]:.1f}")
    assert err.text.splitlines() == [
        "bench: 2 of 9 done, now at 102.1",
        "bench: 4 of 9 done, now at 107.6",
    ]


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    done = run("demo")
    assert done.status == 1
    assert done.err == "microddp demo: error: the demo needs scikit-learn: pip install 'microddp[demo]'\n"


def test_json_holds_no_nan(tmp_path: Path) -> None:
    done = run("explain", "tree", "--ranks", "2", "--tensor", "nan,inf;1,2", "--json")
    assert done.status == 0
    data = json.loads(done.out, parse_constant=lambda name: pytest.fail(name))["steps"][-1]["ranks"][0]["data"]
    assert data == ["nan", "inf"]

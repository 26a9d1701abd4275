"""``bench/device_check.py`` where there is no GPU: its parts fail on their own, and what it compares it compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.device.comparing import difference
from bench.device.launcher_cases import all_cases, compare_case
from bench.device.part_bandwidth import Rotation
from bench.device.parts import PARTS
from bench.device.records import Context, Outcome, Record, outcome_of, read_records
from bench.device.runner import NO_FIGURE, Result
from bench.device.table import table_of
from bench.device.team import adopt
from bench.device.timing import medians_us
from microddp_kernels.launchers import EagerLauncher
from microddp_kernels.reduce_op import CombineSpec, Values

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True)
class Done:
    """What the command left: its exit status and output, and the parts of its JSON by name."""

    status: int
    table: str
    document: dict[str, Any]

    @property
    def parts(self) -> dict[str, Any]:
        return {each["part"]: each for each in self.document["parts"]}


def check(tmp_path: Path, *argv: str) -> Done:
    """Runs it as a user would, from another folder."""
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench" / "device_check.py"), "--json", str(found), *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert found.exists(), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 100
    return Done(done.returncode, done.stdout, json.loads(found.read_text()))


def test_each_part_fails_on_its_own(tmp_path: Path) -> None:
    done = check(tmp_path, "--registry", "tests.device_check_parts:PARTS", "--seconds", "24")
    expected = {
        "good": ("ok", ""),
        "exits": ("crashed", "exited with code 3 (last: the third of five)"),
        "silent": ("crashed", "exited with code 0"),
        "killed": ("crashed", "killed by signal 11"),
        "hangs": ("timed out", "(last: waiting for nothing)"),
        "raises": ("raised", "ZeroDivisionError: by nothing (last: dividing)"),
        "wrong": ("FAILED", "1 of 2: second: 3 instead of 4"),
        "leaves_a_process": ("ok", ""),
        "without_device": ("ok", "") if torch.cuda.is_available() else ("no device", "sees no GPU"),
        "uses_what_was_prepared": ("ok", ""),
        "missing": ("raised", "AttributeError"),
        "hangs_at_exit": ("hung", "did not exit"),
    }
    found = {name: (each["status"], each["detail"]) for name, each in done.parts.items()}
    assert list(found) == list(expected)
    for name, (status, detail) in expected.items():
        assert found[name][0] == status, (name, found[name])
        assert detail in found[name][1]
        assert any(line.startswith(f"{name[:14]:<14} {status}") for line in done.table.splitlines()), name
    assert done.status == 1
    assert done.document["seconds"] < 25
    assert "1.5" in json.dumps(done.parts["good"]["records"])
    assert "ZeroDivisionError" in done.parts["raises"]["records"][-1]["traceback"]
    assert "Segmentation fault" in done.parts["killed"]["errors"]
    (note,) = (each for each in done.parts["leaves_a_process"]["records"] if each["kind"] == "note")
    with pytest.raises(ProcessLookupError):
        os.kill(note["value"], 0)


def test_stand_in_runs_what_needs_no_device_and_gives_no_figure(tmp_path: Path) -> None:
    done = check(tmp_path, "--stand-in", "--seconds", "80", "--parts", "environment,bandwidth,launchers,ranks")
    assert "STAND-IN, no device" in done.table
    found = {name: (each["status"], each["detail"]) for name, each in done.parts.items()}
    nothing = ("no device", NO_FIGURE)
    assert found == {"environment": ("ok", ""), "launchers": ("ok", ""), "ranks": ("ok", ""), "bandwidth": nothing}
    assert list(found) == ["environment", "launchers", "ranks", "bandwidth"], "the order of the registry"
    records = [record for part in done.parts.values() for record in part["records"]]
    assert not [record for record in records if record["kind"] == "figure"]
    names = [record["name"] for record in records if record["kind"] == "check"]
    assert any(name.startswith("combine sum float32") for name in names)
    assert {"n=2: ring sum float32[1003] torch", "n=2: ring sum float32[1003] lanes"} <= set(names)
    assert done.status == 0


def test_parts_that_need_a_device_are_not_started_on_a_stand_in(tmp_path: Path) -> None:
    done = check(tmp_path, "--registry", "tests.device_check_parts:SKIPPED", "--seconds", "20", "--stand-in")
    assert {name: each["status"] for name, each in done.parts.items()} == {"hangs": "no device", "good": "ok"}
    assert done.status == 0


def test_what_its_parts_name_exists() -> None:
    import importlib

    for part in PARTS:
        for name in filter(None, (part.function, part.prepare)):
            module, _, attribute = name.partition(":")
            assert callable(getattr(importlib.import_module(module), attribute))


def _bits(dtype: torch.dtype, *patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype={2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize(
    ("found", "want", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, -NAN]), True),
        (_bits(torch.float32, 0x7FC00000), _bits(torch.float32, 0x7FC00001), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([NAN]), torch.tensor([1.0]), False),
        (_bits(torch.bfloat16, 0x3F80), _bits(torch.bfloat16, 0x3F81), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([2**31], dtype=torch.uint32), torch.tensor([2**31 + 1], dtype=torch.uint32), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
    ],
)
def test_bits_are_compared(found: torch.Tensor, want: torch.Tensor, same: bool) -> None:
    assert bool(difference(found, want, None)) is not same


def test_what_has_no_one_right_rounding_has_a_tolerance() -> None:
    one = torch.ones(3)
    assert not difference(one, one + 2**-21, torch.float32)
    assert difference(one, one + 2**-17, torch.float32)
    assert difference(one, torch.tensor([1.0, NAN, 1.0]), torch.float32)


class Spoilt(EagerLauncher):
    """Wrong in the last element of whatever it writes, as a missing tail would be."""

    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec) -> None:
        super().combine(out, operands, how)
        _spoil(out[-1] if isinstance(out, tuple) else out)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(out, source)
        _spoil(out)

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        super().pack(out, sources)
        _spoil(out)

    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        super().unpack(outs, source)
        _spoil(outs[-1])


def _spoil(out: torch.Tensor) -> None:
    bits = out.view(torch.uint8) if out.dim() == 1 else out[-1].view(torch.uint8)
    bits[-1] ^= 1 if out.dtype == torch.bool else 0x20


def test_a_wrong_tail_is_seen_in_every_kernel() -> None:
    """By each kernel on one type, and of types whose every bit pattern is NaN nothing is asked."""
    eager = EagerLauncher()
    cases = {(case.kernel, case.operator): case for case in reversed(all_cases()) if "int" in case.dtypes[0]}
    assert {kernel for kernel, _ in cases} >= {"combine", "fold", "copy", "strided", "pack", "unpack"}
    for case in cases.values():
        assert not compare_case(eager, CPU, eager, case, 17), case.text
        assert compare_case(Spoilt(), CPU, eager, case, 17), case.text


def test_every_case_is_there_once_and_the_important_ones_are_first() -> None:
    cases = all_cases()
    assert len(cases) == len(set(cases)) > 400
    assert (cases[0].kernel, cases[0].operator, cases[0].dtypes) == ("combine", "sum", ("float32",))
    assert len({case.operator for case in cases}) == 17  # 15 that are shipped, a user's, and none


def test_buffers_are_not_used_again_before_the_cache_is_full_of_others() -> None:
    rotation = Rotation(torch.empty(1 << 16, dtype=torch.uint8), 1 << 10)
    seen = [each.data_ptr() for _ in range(21) for each in rotation.take(torch.float32, 3)]
    assert len(set(seen[:63])) == 63
    assert Rotation(torch.empty(6000, dtype=torch.uint8), 1000).take(torch.uint8, 6)[5].numel() == 1000


def test_the_first_round_is_not_counted() -> None:
    order: list[tuple[str, int]] = []

    def run(name: str) -> Callable[[int], object]:
        return lambda number: order.append((name, number))

    found = medians_us({"one": run("one"), "two": run("two")}, 3, float("inf"), CPU)
    assert order == [(name, number) for number in range(4) for name in ("one", "two")]
    assert set(found) == {"one", "two"}
    slow_at_first = medians_us({"it": lambda number: time.sleep(0.0 if number else 0.1)}, 1, float("inf"), CPU)
    assert slow_at_first["it"] < 40_000


def test_a_check_of_ranks_is_right_only_if_it_is_on_all_of_them(tmp_path: Path) -> None:
    def rank(status: str, **checks: bool) -> Outcome:
        records: list[Record] = [
            {"kind": "check", "name": name, "ok": ok, "detail": "x"} for name, ok in checks.items()
        ]
        return Outcome(status, "why", records)

    context = Context(tmp_path / "records", tmp_path, True)
    assert adopt(context, "n=2", [rank("ok", a=True, b=True, c=True), rank("FAILED", a=True, b=False)])
    found = {each["name"]: (each["ok"], each["detail"]) for each in read_records(context.path)}
    assert found["n=2: a"] == (True, "")
    assert found["n=2: b"] == (False, "rank 1: x")
    assert found["n=2: c"] == (False, "not done on ranks [1]")
    assert not adopt(context, "n=3", [rank("ok", a=True), rank("crashed")])
    assert read_records(context.path)[-2]["name"] == "n=3: rank 1"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_text('{"kind": "ready"}\n{"kind": "che')
    assert read_records(path) == [{"kind": "ready"}]
    assert outcome_of(read_records(path), None, 3.2).detail == "its work took longer than 3 s"
    assert outcome_of([], None, 3.2).detail == "its imports took longer than 3 s"


def test_the_table_stays_short_whatever_there_is_to_say() -> None:
    long = {"kind": "summary", "text": "a word and another " * 40}
    results = [Result(part, Outcome("ok", "", [long, long]), 123.4) for part in PARTS]
    lines = table_of(results, True, 149.0).splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 100
    assert all(any(line.startswith(part.name) for line in lines) for part in PARTS)
    assert sum("… (JSON)" in line for line in lines) == len(PARTS)

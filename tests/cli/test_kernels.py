"""``microddp kernels``: its table, its JSON, its exit status; what it refuses, and how."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from microddp.cli.kernels_report import write_report
from microddp.cli.output import Output
from microddp_kernels import op_names, op_registry
from microddp_kernels.inspection import Case, KernelFacts, KernelFailure, cases_for
from tests.cli.tools import Pipe, run, run_process

pytestmark = pytest.mark.timeout(120)

BROKEN = "tests.kernels.broken"
OPERATOR = """
import triton
import triton.language as tl
import microddp

@microddp.reduce_op(commutative=True, dtypes="floats")
@triton.jit
def own_absmin(first, second):
    return tl.minimum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)
"""
GOOD = KernelFacts(
    case=Case(100, "combine", "softmax_merge", ("float8_e4m3fn", "bfloat16")),
    function="combine_kernel",
    registers=56,
    spills=0,
    spills_in_tail_only=True,
    stack=0,
    shared=0,
    load_bits=128,
    store_bits=128,
    narrow=0,
    bytes_per_element=1616.0,
    minimum_bytes=1616.0,
    moves_minimum=True,
    instructions_per_16_bytes=16.25,
    whole_kernel=False,
    fused=252,
    contracted=0,
    float_instructions=("add.rn.f32",),
    offset_bits=64,
)


def _report(*found: KernelFacts | KernelFailure) -> list[str]:
    out = Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        write_report(found, Output(out), 1.5)
    return out.text.splitlines()


def _cells(line: str) -> list[str]:
    return line.split()


def test_one_kernel() -> None:
    done = run("kernels", "sum", "--kernel", "combine", "--dtype", "bfloat16")
    lines = done.out.splitlines()
    assert done.status == 0, done.err
    row = next(_cells(line) for line in lines if line.startswith("combine"))
    assert row[:4] == ["combine", "sum", "bfloat16", "sm_90"] and int(row[4]) > 16
    assert row[5:12] == ["0", "0", "0", "128", "128", "6", "6"] and float(row[12]) > 10
    assert row[13:] == ["0", "OK"]
    assert lines[-1].startswith("1 kernel compiled in ") and lines[-1].endswith(" s; all keep the rules")


def test_an_operator_of_the_working_directory_and_json(tmp_path: Path) -> None:
    (tmp_path / "own_kernels_operator.py").write_text(OPERATOR)
    (tmp_path / "own_kernels_bad.py").write_text("1 / 0")
    found = tmp_path / "facts.json"
    names = ("--kernel", "combine,copy", "--dtype", "float16", "--arch", "80,sm_90", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(op_registry, "_ops", dict(op_registry._ops))
        done = run("kernels", "own_kernels_operator:own_absmin", *names, str(found))
        bad = run("kernels", "own_kernels_bad:own_absmin")
        assert "own_absmin" in op_names() and "own_absmin" not in {case.operator for case in cases_for([90])}
    assert done.status == 0, done.err
    facts = json.loads(found.read_text("utf-8"))
    assert [(each["case"]["arch"], each["case"]["kernel"]) for each in facts] == [
        *((80, "combine"), (80, "copy"), (90, "combine"), (90, "copy"))
    ]
    assert {each["case"]["operator"] for each in facts} == {"own_kernels_operator:own_absmin", ""}
    assert [each["bytes_per_element"] for each in facts] == [6, 4, 6, 4]
    assert all(each["violations"] == [] and each["load_bits"] == 128 for each in facts)
    assert bad.status == 2 and "cannot import own_kernels_bad: ZeroDivisionError: division by zero" in bad.err


def test_what_does_not_compile_is_shown_with_the_users_source() -> None:
    done = run("kernels", f"{BROKEN}:float_only", "--kernel", "combine", "--dtype", "float32,float64")
    assert done.status == 1
    assert done.err.endswith("microddp kernels: 1 kernel of 2 not as they should be\n")
    compiled, _, failed = done.out.partition("Not compiled\n")
    assert "float_only float32 sm_90" in compiled and "float64" not in compiled
    assert failed.startswith(
        f"combine of {BROKEN}:float_only, float64, sm_90\n    CompileTimeAssertionFailure: at 2:4:\n"
    )
    assert "    def _float_only(first, second):\n" in failed and "this one takes float32 only" in failed
    assert "combine_kernel" not in done.out and "COMBINE" not in done.out  # how the library came there
    assert "1 kernel compiled in" in failed and "1 kernel failed; all keep the rules" in failed


def test_json_on_the_standard_output_is_all_that_is_there() -> None:
    done = run_process("kernels", f"{BROKEN}:float_only", "--kernel", "combine", "--dtype", "float64", "--json", "-")
    (failure,) = done.json
    assert done.status == 1 and "this one takes float32 only" in failure["error"]
    assert failure["case"] == {
        "arch": 90,
        "kernel": "combine",
        "operator": f"{BROKEN}:float_only",
        "dtypes": ["float64"],
    }


def test_what_breaks_rules_is_named() -> None:
    bad = replace(GOOD, spills=7, stack=64, load_bits=8, narrow=3, contracted=2)
    lines = _report(GOOD, bad, replace(GOOD, spills=7, spills_in_tail_only=False))
    assert [line.split()[-1] for line in lines if line.startswith("combine ")][:3] == ["OK", "NO", "NO"]
    start = lines.index("Rules that are broken")
    said = " ".join(" ".join(lines[start + 1 :]).split())
    assert said.startswith(
        f"{bad.case.text}: 3 accesses narrower than 128 bits (loads 8, stores 128); 7 spilling instructions "
        "(none of them in a full block); 64 bytes of stack; 2 contracted multiply-adds"
    )
    assert said.endswith("7 spilling instructions 3 kernels compiled in 1.5 s; 2 of them break a rule")
    assert lines[-1] == "3 kernels compiled in 1.5 s; 2 of them break a rule"


def test_marks_are_explained_where_they_stand() -> None:
    assert not [line for line in _report(GOOD) if line.startswith(("*", "~"))]
    lines = _report(replace(GOOD, whole_kernel=True, bytes_per_element=1700.0))
    row = next(line for line in lines if line.startswith("combine"))
    assert "16.2*" in row and "1700~" in row and row.endswith("OK")
    assert [line[0] for line in lines if line.startswith(("*", "~"))] == ["*", "~"]
    unknown = _report(replace(GOOD, spills=None, instructions_per_16_bytes=None, untraced="it is not"))
    assert _cells(next(line for line in unknown if line.startswith("combine")))[5:] == [
        *("?", "0", "0", "?", "?", "?", "1616", "?", "252", "NO")
    ]


def test_a_report_of_shipped_operators_fits_120_columns() -> None:
    long = replace(
        GOOD, instructions_per_16_bytes=1385.5, case=replace(GOOD.case, dtypes=("bfloat16", "float32", "bfloat16"))
    )
    lines = _report(GOOD, *[long] * 30, replace(GOOD, case=Case(90, "weighted", "avg", ("float16",))))
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("combine") for line in lines) == 31
    start = next(index for index, line in enumerate(lines) if line.startswith("weighted"))
    assert lines[start - 1] == ""  # an empty line before another kernel of a long report


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("plus",), "unknown operator 'plus'"),
        ((f"{BROKEN}:nothing",), "has no 'nothing'; its operators: asks_for_fma, float_only, product_and_sum"),
        ((f"{BROKEN}:BLOCK",), "is no operator but of type int: declare it with @microddp.reduce_op"),
        (("no.such:op",), "cannot import no.such: ModuleNotFoundError"),
        (("--dtype", "float31"), "unknown element type 'float31'; known: float32, "),
        (("--kernel", "nothing"), "unknown kernel 'nothing'; known: combine, "),
        (("--arch", "sm_"), "--arch: 'sm_' is not an architecture such as sm_90"),
        (("band", "--dtype", "float32"), "there is nothing to compile"),
        (("--all", "--quick"), "not allowed with"),
    ],
)
def test_what_is_asked_wrong_is_told(argv: tuple[str, ...], text: str) -> None:
    done = run("kernels", *argv)
    assert (done.status, done.out) == (2, "") and text in done.err

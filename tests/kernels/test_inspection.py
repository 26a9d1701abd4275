"""The compile report: every operator on every element type keeps the rules on sm_90, and what breaks one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from microddp_kernels import get_op
from microddp_kernels.dtypes import BOOL, COMPLEX, FLOATS, FLOATS8, INTEGERS, UNSIGNED, dtype_names
from microddp_kernels.inspection import (
    DTYPES,
    KERNELS,
    Case,
    InspectionError,
    KernelFacts,
    KernelFailure,
    cases_for,
    inspect_cases,
    inspect_kernels,
    load_operator,
)

pytestmark = pytest.mark.timeout(240)

BROKEN = "tests.kernels.broken"
SHIPPED = (
    *("sum", "prod", "min", "max", "avg", "band", "bor", "bxor"),
    *("argmax", "argmin", "welford", "logsumexp", "softmax_merge", "absmax", "logaddexp"),
)


def _broken(name: str, dtype: str = "float32", arch: int = 90) -> Case:
    return Case(arch, f"{BROKEN}:{name}", "", (dtype,))


def _combine(operator: str, dtype: str = "float32", kernel: str = "combine", arch: int = 90) -> Case:
    return Case(arch, kernel, operator, (dtype,))


@pytest.fixture(scope="module")
def gate() -> dict[Case, KernelFacts]:
    """Two operands of every operator on every element type, for sm_90."""
    cases = cases_for([90])
    return dict(zip(cases, inspect_kernels(cases, read_sass=False)))


# Each with machine code. The first of each pair breaks a rule, the second, its like, does not.
READ = {
    "masked": _broken("masked_only"),
    "contracting": _broken("contracting"),
    "not contracting": _broken("not_contracting"),
    "twice": _broken("reads_twice"),
    "half": _broken("writes_half"),
    "short": _broken("short_offsets"),
    "gathering": _broken("gathering", "int64"),
    "crowded": _broken("crowded", "float64"),
    "roomy": _broken("roomy", "float64"),
    "fma": _combine(f"{BROKEN}:asks_for_fma"),
    "product and sum": _combine(f"{BROKEN}:product_and_sum"),
    "fma of bfloat16": _combine("sum", "bfloat16", arch=80),
    "sum": _combine("sum"),
    "four": _combine("sum", "bfloat16", "fold"),
    "weighted": _combine("avg", "float16", "weighted"),
    "divided": _combine("avg", "float32", "finish"),
    "logarithm": _combine("logaddexp", "float64"),
    "copy": Case(90, "copy", "", ("uint8",)),
    "convert": Case(90, "convert", "", ("bfloat16", "float32")),
    "wire": Case(90, "wire", "sum", ("float32", "bfloat16")),
    "strided": Case(90, "strided", "", ("float32",)),
    "pack": Case(90, "pack", "", ("float32",)),
    "unpack": Case(90, "unpack", "", ("bool",)),
    "sm_100": _combine("sum", "float64", arch=100),
}


@pytest.fixture(scope="module")
def read() -> dict[str, KernelFacts]:
    return dict(zip(READ, inspect_kernels(list(READ.values()))))


def test_the_gate_covers_every_operator_on_every_element_type(gate: dict[Case, KernelFacts]) -> None:
    wanted = {
        (name, dtype_names([dtype]))
        for name in SHIPPED
        for dtype in (get_op(name).lanes[0].dtypes if get_op(name).lanes else get_op(name).dtypes)
    }
    assert {(case.operator, case.dtypes[0]) for case in gate} == wanted
    assert set(DTYPES.values()) == FLOATS | FLOATS8 | COMPLEX | INTEGERS | UNSIGNED | BOOL


def test_every_operator_keeps_the_rules_on_every_element_type(gate: dict[Case, KernelFacts]) -> None:
    broken = {facts.case.text: facts.violations() for facts in gate.values() if facts.violations()}
    assert broken == {}


def test_full_blocks_move_the_minimum_in_128_bits(gate: dict[Case, KernelFacts]) -> None:
    """The figures themselves, for operators of one lane: three tensors, each element once."""
    for case, facts in gate.items():
        if not get_op(case.operator).lanes:
            assert (facts.load_bits, facts.store_bits) == (128, 128), case.text
            assert facts.bytes_per_element == 3 * DTYPES[case.dtypes[0]].itemsize, case.text
            assert (facts.stack, facts.shared, facts.contracted) == (0, 0, 0), case.text


@pytest.mark.parametrize(
    ("name", "violations"),
    [
        ("masked", ["32 accesses narrower than 128 bits (loads 32, stores 32)"]),
        ("contracting", ["16 contracted multiply-adds"]),
        ("twice", ["moves 12 bytes an element, not 8"]),
        ("short", ["offsets of 32 bits"]),
        ("half", ["moves 0 bytes an element, not 8"]),
    ],
)
def test_what_breaks_one_rule_is_told(read: dict[str, KernelFacts], name: str, violations: list[str]) -> None:
    assert list(read[name].violations()) == violations


def test_addresses_that_depend_on_data_are_not_guessed(read: dict[str, KernelFacts]) -> None:
    facts = read["gathering"]
    (violation,) = facts.violations()
    assert violation.startswith("cannot be followed: ld.global") and violation.endswith("depends on data")
    assert facts.whole_kernel and facts.instructions_per_16_bytes is not None


def test_spills_are_told(read: dict[str, KernelFacts]) -> None:
    facts = read["crowded"]
    assert facts.registers <= 24 and facts.stack and facts.spills
    assert not facts.spills_in_tail_only  # this kernel has no tail
    assert {"bytes of stack", "spilling instructions"} <= {each.split(maxsplit=1)[1] for each in facts.violations()}
    assert read["roomy"].violations() == ()


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("not contracting", 0),
        ("fma", 16 * 2),  # 16 elements a thread, in the full block and in the tail
        ("product and sum", 0),
        ("fma of bfloat16", 16 * 2),  # an architecture without bfloat16 additions
        ("divided", 0),  # divisions use fused operations in machine code only
        ("weighted", 0),
    ],
)
def test_what_was_asked_for_is_not_contraction(read: dict[str, KernelFacts], name: str, fused: int) -> None:
    assert (read[name].fused, read[name].contracted, read[name].violations()) == (fused, 0, ())


def test_a_library_function_asks_for_its_fused_operations(read: dict[str, KernelFacts]) -> None:
    facts = read["logarithm"]
    assert facts.fused > 100 and facts.contracted == 0 and facts.violations() == ()


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("sum", 12),
        ("four", 10),
        ("weighted", 6),
        ("divided", 20),
        ("copy", 2),
        ("convert", 6),
        ("wire", 10),
        ("strided", 8),
        ("pack", 8),
        ("unpack", 2),
        ("sm_100", 24),
    ],
)
def test_other_kernels_keep_the_rules(read: dict[str, KernelFacts], name: str, nbytes: float) -> None:
    facts = read[name]
    assert facts.violations() == ()
    assert (facts.bytes_per_element, facts.minimum_bytes, facts.spills) == (nbytes, nbytes, 0)
    if name != "strided":
        assert facts.load_bits >= 128 and facts.store_bits >= 128


def test_what_is_computed_of_floats(gate: dict[Case, KernelFacts], read: dict[str, KernelFacts]) -> None:
    """Divisions are correctly rounded, NaN propagates, and bfloat16 is rounded by the hardware."""
    for name in ("divided", "weighted"):
        assert [each for each in read[name].float_instructions if each.startswith("div")] == ["div.rn.f32"]
    assert "max.NaN.f32" in gate[_combine("max")].float_instructions
    assert "min.NaN.f32" in gate[_combine("min")].float_instructions
    assert "cvt.rn.bf16x2.f32" in read["four"].float_instructions
    assert gate[_combine("sum", "int32")].float_instructions == ()


def test_instructions_are_those_of_a_full_block(read: dict[str, KernelFacts]) -> None:
    """A thread adds 16 floats out of 8 loads and stores them in 4: no fewer, and not much more than twice as many."""
    count = read["sum"].instructions_per_16_bytes
    assert count is not None and not read["sum"].whole_kernel
    assert 28 <= count * 4 < 80
    divided = read["divided"].instructions_per_16_bytes
    assert divided is not None and count * 3 < divided and not read["divided"].whole_kernel


def test_the_tail_is_not_counted(read: dict[str, KernelFacts]) -> None:
    masked, copied = read["masked"].instructions_per_16_bytes, read["copy"].instructions_per_16_bytes
    assert masked is not None and copied is not None
    assert copied < 40 < masked * 4


def test_failures_are_told_by_case_and_the_rest_is_compiled() -> None:
    operator = f"{BROKEN}:float_only"
    found = dict(inspect_cases([_combine(operator), _combine(operator, "float64"), _broken("silent")], read_sass=False))
    assert isinstance(found[0], KernelFacts) and found[0].spills is None
    assert found[0].instructions_per_16_bytes is None and found[0].violations() == ()
    assert isinstance(found[1], KernelFailure) and "this one takes float32 only" in found[1].error
    assert isinstance(found[2], KernelFailure) and "expected one launch, found 0" in found[2].error
    with pytest.raises(InspectionError, match="float_only, float64, sm_90:\nCompileTimeAssertionFailure"):
        inspect_kernels([_combine(operator, "float64")], read_sass=False)


def test_the_interpreter_in_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (facts,) = inspect_kernels([_combine("sum")], read_sass=False)
    assert facts.violations() == ()
    assert list(tmp_path.rglob("*.cubin"))  # where the user wants it


def test_the_cache_is_private_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inspect_kernels([_combine("sum")], read_sass=False)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InspectionError, match="died, float32, sm_90: the process that compiles ended or took too long"):
        inspect_kernels([_broken("died")])


def test_stopping_early_leaves_no_process() -> None:
    outcomes = inspect_cases([_combine("sum")] * 4, read_sass=False, num_processes=1)
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("no.such:op", ValueError, "cannot import no.such: ModuleNotFoundError"),
        (f"{BROKEN}:nothing", ValueError, "has no 'nothing'; its operators: asks_for_fma, float_only, product_and_sum"),
        (f"{BROKEN}:not_an_operator", TypeError, "is no operator but of type JITFunction: declare it with @microddp"),
        ("plus", ValueError, "unknown operator 'plus'"),
    ],
)
def test_operators_that_are_none(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        load_operator(name)


def test_cases() -> None:
    assert cases_for([80, 90], ["sum"], ["float32"]) == [_combine("sum", arch=80), _combine("sum")]
    assert cases_for([90], ["band"], ["float32"]) == []
    assert [case.dtypes for case in cases_for([90], ["argmax"], ["float16"])] == [("float16", "int64")]
    assert [case.dtypes[0] for case in cases_for([90], ["avg"], kernels=["weighted"])] == [
        *("float16", "float8_e4m3fn", "float8_e5m2"),
    ]
    assert len(cases_for([90], ["sum", "max"], kernels=["combine", "copy"], quick=True)) == 3
    everything = cases_for([90], kernels=list(KERNELS))
    assert len(everything) == len(set(everything)) and {case.kernel for case in everything} == set(KERNELS)
    for bad in ({"dtypes": ["float31"]}, {"kernels": ["nothing"]}, {"operators": ["plus"]}):
        with pytest.raises(ValueError, match="unknown"):
            cases_for([90], **bad)  # type: ignore[arg-type]

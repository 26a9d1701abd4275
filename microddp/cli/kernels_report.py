"""The report of ``microddp kernels``: a table, the rules that are broken, what does not compile; or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from microddp.cli.output import Column, Output, counted
from microddp_kernels.inspection import KernelFacts, KernelFailure

__all__ = ["as_json", "write_report"]

_COLUMNS: Final = (
    Column("kernel"),
    Column("operator"),
    Column("dtype"),
    Column("arch"),
    Column("regs", "right"),
    Column("spills", "right"),
    Column("stack\n(B)", "right"),
    Column("shared\n(B)", "right"),
    Column("load\n(bit)", "right"),
    Column("store\n(bit)", "right"),
    Column("bytes/\nelement", "right"),
    Column("min", "right"),
    Column("instr/\n16 B", "right"),
    Column("fma", "right"),
    Column("rules"),
)

_MAX_DTYPES_WIDTH: Final = 22


def write_report(found: Sequence[KernelFacts | KernelFailure], out: Output, seconds: float) -> None:
    """The table, then what is wrong, then one line that sums up.

    Args:
        found: of each kernel the facts, or why it does not compile.
        out: where to write.
        seconds: how long it took.
    """
    facts = [each for each in found if isinstance(each, KernelFacts)]
    failures = [each for each in found if isinstance(each, KernelFailure)]
    if facts:
        out.table(_COLUMNS, [_row(each) for each in facts], _ends_of_groups(facts), may_close_up=True)
    broken = [each for each in facts if each.violations()]
    if broken:
        out.heading("Rules that are broken")
        for each in broken:
            out.paragraph(f"{each.case.text}: {'; '.join(each.violations())}", indent="  ")
    if failures:
        out.heading("Not compiled")
        _write_failures(failures, out)
    for note in _notes(facts):
        out.line()
        out.paragraph(note, indent="  ")
    if facts:
        out.line()
    verdict = "all keep the rules" if not broken else f"{len(broken)} of them break{'s' * (len(broken) == 1)} a rule"
    failed = f", {counted(len(failures), 'kernel')} failed" if failures else ""
    out.line(f"{counted(len(facts), 'kernel')} compiled in {seconds:.1f} s{failed}; {verdict}")


def _notes(facts: Sequence[KernelFacts]) -> Iterator[str]:
    """What the marks in the table mean, of those that stand there."""
    if any(each.whole_kernel for each in facts):
        yield "* instructions of the whole kernel: the way through a full block cannot be told apart"
    if any(_has_unjudged(each) for each in facts):
        yield "~ only the wide lane is judged: several instructions ask for the few bytes of the other lanes"


def _has_unjudged(facts: KernelFacts) -> bool:
    return facts.moves_minimum and facts.bytes_per_element != facts.minimum_bytes


def _ends_of_groups(facts: Sequence[KernelFacts]) -> list[int]:
    """Where the next row is of another kernel or another architecture; nowhere in a short table."""
    groups = [(each.case.arch, each.case.kernel) for each in facts]
    return [index for index in range(len(facts) - 1) if groups[index] != groups[index + 1]] if len(facts) > 24 else []


def _row(facts: KernelFacts) -> tuple[str, ...]:
    case, instructions = facts.case, facts.instructions_per_16_bytes
    known = not facts.untraced
    return (
        case.kernel,
        case.operator or "-",
        _dtypes_text(case.dtypes),
        f"sm_{case.arch}",
        str(facts.registers),
        "?" if facts.spills is None else str(facts.spills),
        str(facts.stack),
        str(facts.shared),
        str(facts.load_bits) if known else "?",
        str(facts.store_bits) if known else "?",
        f"{facts.bytes_per_element:g}{'~' if _has_unjudged(facts) else ''}" if known else "?",
        f"{facts.minimum_bytes:g}",
        "?" if instructions is None else f"{instructions:.1f}{'*' if facts.whole_kernel else ''}",
        f"{facts.fused}" if not facts.contracted else f"{facts.fused} ({facts.contracted} contracted)",
        "NO" if facts.violations() else "OK",
    )


def _dtypes_text(names: Sequence[str]) -> str:
    """Two types on one line, more on several."""
    return "\n".join(textwrap.wrap(", ".join(names), _MAX_DTYPES_WIDTH + 2)).replace(", ", ",")


def _write_failures(failures: Sequence[KernelFailure], out: Output) -> None:
    """Each error once, below the cases that it befell."""
    by_error: dict[str, list[KernelFailure]] = {}
    for each in failures:
        by_error.setdefault(each.error, []).append(each)
    for error, alike in by_error.items():
        for each in alike:
            out.line(each.case.text)
        for line in error.splitlines():
            out.line(f"    {line}")
        out.line()


def as_json(found: Sequence[KernelFacts | KernelFailure]) -> list[dict[str, Any]]:
    """The facts, or the error, of each kernel."""
    return [each.as_dict() if isinstance(each, KernelFacts) else asdict(each) for each in found]

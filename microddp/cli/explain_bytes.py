"""The part of an explanation that holds the counted bytes against the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from microddp.cli.explain import Explanation, Traffic
from microddp.cli.formulas import ALIGNMENT_NBYTES
from microddp.cli.output import Column, Output

__all__ = ["ranks_text", "write_bytes"]


def write_bytes(explanation: Explanation, out: Output) -> None:
    """Writes the table: a row for all ranks of one role."""
    out.heading("Bytes, counted by the transport | formula")
    rows = []
    for (_, *cells), group in groupby(_by_role(explanation.traffic), key=lambda each: _traffic_key(each)):
        ranks = ranks_text([each.rank for each in group])
        rows.append([ranks, *cells])
    columns = [Column("rank"), Column("role"), Column("sent"), Column("received"), Column("in all"), Column("")]
    out.table(columns, rows)
    if any(each.share and each.share.tolerance_nbytes for each in explanation.traffic):
        unit = f"{ALIGNMENT_NBYTES}n = {ALIGNMENT_NBYTES * explanation.schedule.world_size}"
        out.paragraph(f"S is not a multiple of {unit} bytes: within {ALIGNMENT_NBYTES} bytes a chunk.", "dim")


def _by_role(traffic: Sequence[Traffic]) -> list[Traffic]:
    first: dict[tuple[str, ...], int] = {}
    for each in traffic:
        first.setdefault(_traffic_key(each), each.rank)
    return sorted(traffic, key=lambda each: (first[_traffic_key(each)], each.rank))


def _traffic_key(each: Traffic) -> tuple[str, ...]:
    share, both = each.share, each.sent + each.received
    verdict = "OK" if each.is_right else "MISMATCH"
    if share is None:
        sent, received = (f"{counted} | {planned} by its schedule" for counted, planned in _pairs(each))
        return ("", "", sent, received, str(both), verdict)
    return (
        share.role,
        share.role,
        f"{each.sent} | {share.sent}",
        f"{each.received} | {share.received}",
        f"{both} | {share.both}",
        verdict,
    )


def _pairs(each: Traffic) -> list[tuple[int, int]]:
    return [(each.sent, each.scheduled_sent), (each.received, each.scheduled_received)]


def ranks_text(numbers: Sequence[int]) -> str:
    """Sorted numbers as runs: ``0, 2-4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

"""What ``check_operator`` returns, and what it raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from microddp_kernels.dtypes import dtype_names

__all__ = ["CheckRecord", "OperatorError", "OperatorReport"]


class OperatorError(AssertionError):
    """An operator is not what it declares to be, or its launchers disagree. The text holds a counterexample.

    Attributes:
        law: which law is broken, ``"commutative"``; see ``check_operator``.
        launcher: which launchers were seen to break it.
        dtypes: the element types, one a lane.
        operands: the operands of the counterexample, each a tuple of its lanes' values as text.
        results: what was compared: (what was computed, the values of its lanes as text).
    """

    def __init__(
        self,
        text: str,
        *,
        law: str,
        launcher: str,
        dtypes: tuple[torch.dtype, ...],
        operands: Sequence[tuple[str, ...]] = (),
        results: Sequence[tuple[str, tuple[str, ...]]] = (),
    ) -> None:
        super().__init__(text)
        self.law = law
        self.launcher = launcher
        self.dtypes = dtypes
        self.operands = tuple(operands)
        self.results = tuple(results)


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """One comparison that held.

    Attributes:
        law: what held, ``"associative"``.
        launcher: where it was computed.
        dtypes: the element types, one a lane.
        num_rows: on how many combinations of operands.
        num_excused: on how many of them a difference was put down to rounding, or to infinities (see
            ``check_operator``).
    """

    law: str
    launcher: str
    dtypes: tuple[torch.dtype, ...]
    num_rows: int
    num_excused: int = 0


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """What was checked of an operator, all of which held. ``str`` gives a table.

    Attributes:
        operator: its name.
        seed: of the random operands.
        records: one for each comparison.
        notes: what else there is to know, such as a launcher that fell back to another.
    """

    operator: str
    seed: int
    records: tuple[CheckRecord, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def laws(self) -> tuple[str, ...]:
        """The laws that were checked, in order."""
        return tuple(dict.fromkeys(record.law for record in self.records))

    @property
    def num_rows(self) -> int:
        """On how many combinations of operands something was compared, all comparisons together."""
        return sum(record.num_rows for record in self.records)

    def __str__(self) -> str:
        dtypes = tuple(dict.fromkeys(record.dtypes for record in self.records))
        heading = (
            f"operator {self.operator!r}: {len(self.records)} comparisons of {self.num_rows} combinations of operands "
            f"held (seed {self.seed})"
        )
        types = ", ".join(_names(each) for each in dtypes)
        return "\n".join([heading, f"  types: {types}", *self._lines(), *(f"  note: {note}" for note in self.notes)])

    def _lines(self) -> list[str]:
        groups: dict[tuple[str, str], list[CheckRecord]] = {}
        for record in self.records:
            groups.setdefault((record.law, record.launcher), []).append(record)
        width = max((len(law) for law, _ in groups), default=0)
        return [f"  {law:{width}}  {_summary(launcher, records)}" for (law, launcher), records in groups.items()]


def _summary(launcher: str, records: Sequence[CheckRecord]) -> str:
    num_excused = sum(record.num_excused for record in records)
    excused = f", {num_excused} put down to rounding or infinities" if num_excused else ""
    return f"{launcher}: {sum(record.num_rows for record in records)} combinations{excused}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [dtype_names([dtype]) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"

"""One operator on one combination of element types: its operands, its launchers, and what has been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from microddp.testing.functions import is_exactly_rounded
from microddp.testing.report import CheckRecord, OperatorError
from microddp.testing.runners import Runner, names_of
from microddp.testing.samples import Sampler, draw_operands
from microddp.testing.states import Array, Lanes, column, convert, describe, difficulty, is_float, num_rows, take
from microddp_kernels.dtypes import dtype_names
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["Case", "Settings"]

_ULPS: Final = 4.0
"""Between launchers, where a function has no exact rounding rule."""

_ROUNDINGS: Final = 8.0
_NOISE: Final = 2.0**-44
_NARROWEST: Final = {torch.float32: torch.float16, torch.bfloat16: torch.float16}
_NARROWER: Final = {torch.float64: torch.float32, torch.complex128: torch.complex64}


@dataclass(frozen=True, slots=True)
class Settings:
    """How strictly to check; see ``check_operator``."""

    seed: int
    numel: int
    max_ulps: float | None
    zero_signs: bool | None
    rtol: float
    rounds_once: bool


@dataclass
class Case:
    """What the checks work on.

    Attributes:
        runners: the launchers; the first one also computes what is wider than the element types.
        samples: the caller's source of operands, if any.
        records: what held so far.
    """

    op: ReduceOp
    dtypes: tuple[torch.dtype, ...]
    runners: tuple[Runner, ...]
    settings: Settings
    samples: Sampler | None
    records: list[CheckRecord]
    operands: tuple[Lanes, ...] = field(init=False)
    law_operands: tuple[Lanes, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.wide_op = self.op.on_every_type()
        self.accumulation = tuple(self.op.accumulation_dtype(dtype) for dtype in self.dtypes)
        self.law_dtypes = tuple(_law_dtype(dtype) for dtype in self.accumulation)
        self.operands = self._draw(self.dtypes)
        self.is_widened = self._can_be_widened()
        if not self.is_widened:
            self.law_dtypes = self.accumulation
        # float64 itself has nothing wider to compute in: values of float32's range leave room for the results.
        narrower = self.dtypes
        if self.samples is None:
            limits = _NARROWER if self.is_widened else _NARROWER | _NARROWEST
            narrower = tuple(limits.get(dtype, dtype) for dtype in self.dtypes)
        same = narrower == self.dtypes
        self.law_operands = self.widened(self.operands if same else self._draw(narrower))

    @property
    def coarsest(self) -> torch.dtype:
        """The float type in which the least is kept of what is computed: lanes may depend on each other."""
        kinds = [dtype for lane, dtype in enumerate(self.accumulation) if lane in self.float_lanes]
        return max(kinds, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def is_plain(self) -> bool:
        """A single lane of real numbers."""
        return not self.op.lanes and not self.dtypes[0].is_complex

    @property
    def count(self) -> int:
        """The number of combinations of operands."""
        return num_rows(self.op, self.operands[0])

    def _can_be_widened(self) -> bool:
        """Whether the operator can be computed in float64: some functions of Triton take float32 only."""
        if self.law_dtypes == self.accumulation:
            return True
        few = [take(self.op, lanes, np.arange(2)) for lanes in self.operands[:2]]
        try:
            self.combine_widened(self.widened(few), 2 if self.op.finishes else None)
        except OperatorError as error:
            note = f"laws are checked in {names_of(self.accumulation)}, not in float64: {error.__cause__}"
            if note not in self.runners[0].notes:
                self.runners[0].notes.append(note)
            return False
        return True

    @property
    def law_rtol(self) -> float:
        """What remains of rounding where laws are checked, at the largest value of the lane."""
        return self.settings.rtol if self.is_widened else max(self.settings.rtol, _ROUNDINGS * self._law_eps)

    @property
    def law_noise(self) -> float:
        """Relative errors put on everything that is combined, to see how much a result depends on rounding."""
        return _NOISE if self.is_widened else _ROUNDINGS * self._law_eps

    @property
    def law_type(self) -> str:
        """The float type in which laws are checked, for texts."""
        return dtype_names([max((self.law_dtypes[lane] for lane in self.float_lanes), key=lambda each: each.itemsize)])

    @property
    def _law_eps(self) -> float:
        return torch.finfo(self.coarsest).eps

    def widened(self, operands: Sequence[Lanes]) -> tuple[Lanes, ...]:
        """The operands in the types in which laws are checked."""
        return tuple(convert(lanes, self.law_dtypes) for lanes in operands)

    def combine_widened(
        self, operands: Sequence[Lanes], divisor: int | None = None, scale: float | None = None
    ) -> Lanes:
        """Operands of the law's types combined in these types."""
        return self.runners[0].combine(self.wide_op, operands, self.law_dtypes, divisor=divisor, scale=scale)

    def columns(self, results: Sequence[Lanes], lane: int) -> list[Array]:
        """The values of one lane in each of the results."""
        return [column(lanes[lane], num_rows(self.op, lanes)) for lanes in results]

    def ulps_allowed(self, runner: Runner) -> float:
        """By how many units in the last place of the accumulation type a launcher may differ from the first one."""
        if self.settings.max_ulps is not None:
            return self.settings.max_ulps
        return 0.0 if is_exactly_rounded(self.op, runner.name) else _ULPS

    @property
    def float_lanes(self) -> list[int]:
        """The lanes of floats or complex numbers."""
        return [lane for lane, dtype in enumerate(self.dtypes) if is_float(dtype)]

    def require(
        self,
        law: str,
        complaint: str,
        launcher: str,
        operands: Sequence[Lanes],
        results: Sequence[tuple[str, Lanes]],
        failing: Array,
        num_excused: int = 0,
    ) -> None:
        """Records that ``law`` held, or raises an OperatorError with the simplest of the ``failing`` rows."""
        if not failing.any():
            self.records.append(CheckRecord(law, launcher, self.dtypes, len(failing), num_excused))
            return
        rows = np.flatnonzero(failing)
        row = int(rows[np.argmin(difficulty(self.op, operands)[rows])])
        operand_texts = tuple(describe(self.op, lanes, row) for lanes in operands)
        result_texts = tuple((what, describe(self.op, lanes, row)) for what, lanes in results)
        lines = [f"operator {self.op.name!r} {complaint}", f"  types: {names_of(self.dtypes)}; launcher: {launcher}"]
        lines += [f"  {name} = {self._joined(texts)}" for name, texts in zip("abcd", operand_texts)]
        lines += [f"  {what} = {self._joined(texts)}" for what, texts in result_texts]
        lines += [f"  ({len(rows)} of {len(failing)} combinations fail, seed {self.settings.seed})"]
        raise OperatorError(
            "\n".join(lines),
            law=law,
            launcher=launcher,
            dtypes=self.dtypes,
            operands=operand_texts,
            results=result_texts,
        )

    def _draw(self, dtypes: tuple[torch.dtype, ...]) -> tuple[Lanes, ...]:
        return draw_operands(self.op, self.samples, self.settings.seed, self.settings.numel, dtypes)

    def _joined(self, texts: tuple[str, ...]) -> str:
        if not self.op.lanes:
            return texts[0]
        return f"({', '.join(f'{lane.name}={text}' for lane, text in zip(self.op.lanes, texts))})"


def _law_dtype(accumulation: torch.dtype) -> torch.dtype:
    if accumulation.is_complex:
        return torch.complex128
    return torch.float64 if accumulation.is_floating_point else accumulation

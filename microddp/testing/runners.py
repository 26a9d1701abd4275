"""Runs operators on launchers as a caller would, watching what they do to their operands."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import torch

from microddp.testing.functions import uses_libdevice
from microddp.testing.report import OperatorError
from microddp.testing.states import Lanes, as_values, bytes_of, describe, num_rows
from microddp_kernels.dtypes import dtype_names
from microddp_kernels.launchers import launcher_for
from microddp_kernels.reduce_op import CombineSpec, ReduceOp

__all__ = ["Runner", "names_of", "runners_named"]

_POISON: Final = 0x5A
"""As a byte of any float: a large value."""


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    """The types of the lanes: ``"float32, int64"``."""
    return ", ".join(dtype_names([dtype]) for dtype in dtypes)


def runners_named(names: Sequence[str] | None, op: ReduceOp) -> tuple[Runner, ...]:
    """The runners for launchers of these names; by default all that this machine has and ``op`` can be run by.

    Raises:
        ValueError: no launcher has one of these names.
        ImportError: a launcher needs Triton, which is not installed.
    """
    if names is None:
        interpreted = () if uses_libdevice(op) else ("interpreter",)
        names = (*interpreted, "eager", *(("compiled",) if torch.cuda.is_available() else ()))
    if not names:
        raise ValueError("launchers must name one launcher at least")
    return tuple(Runner(name) for name in names)


class Runner:
    """One launcher. ``notes`` collects what it warned of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda" if name == "compiled" else "cpu")
        self.notes: list[str] = []
        self._launcher = launcher_for(self.device, name)

    def combine(
        self,
        op: ReduceOp,
        operands: Sequence[Lanes],
        dtypes: Sequence[torch.dtype] | None = None,
        *,
        divisor: int | None = None,
        scale: float | None = None,
        alias: int | None = None,
    ) -> Lanes:
        """The operands combined, by default into the types of the first; in place of operand ``alias``, if given.

        Raises:
            OperatorError: the launcher cannot run the operator, or an operand was written.
        """
        given = [tuple(tensor.to(self.device, copy=True) for tensor in lanes) for lanes in operands]
        targets = tuple(tensor.dtype for tensor in operands[0]) if dtypes is None else tuple(dtypes)
        if alias is None:
            out = tuple(_poisoned(tensor.numel(), dtype, self.device) for tensor, dtype in zip(given[0], targets))
        else:
            out = given[alias]
        how = CombineSpec(op, divisor=divisor, scale=scale)
        self._launch(op, out, given, how)
        for index, lanes in enumerate(given):
            if index != alias:
                self._require_unchanged(op, operands, index, lanes)
        return tuple(tensor.cpu() for tensor in out)

    def _launch(self, op: ReduceOp, out: Lanes, given: Sequence[Lanes], how: CombineSpec) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._launcher.combine(as_values(op, out), [as_values(op, lanes) for lanes in given], how)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            except Exception as error:
                dtypes = tuple(tensor.dtype for tensor in out)
                text = (
                    f"operator {op.name!r} cannot be run on {names_of(dtypes)} by the {self.name} launcher: "
                    f"{type(error).__name__}: {error}"
                )
                raise OperatorError(text, law="runs", launcher=self.name, dtypes=dtypes) from error
        for warning in caught:
            note = f"{self.name}, {names_of([tensor.dtype for tensor in out])}: {warning.message}"
            if note not in self.notes:
                self.notes.append(note)

    def _require_unchanged(self, op: ReduceOp, operands: Sequence[Lanes], index: int, found: Lanes) -> None:
        count = num_rows(op, found)
        for lane, (before, tensor) in enumerate(zip(operands[index], found)):
            after = tensor.cpu()
            changed = (bytes_of(before) != bytes_of(after)).view(count, -1).any(dim=1)
            if not changed.any():
                continue
            row = int(changed.nonzero()[0])
            was, now = (describe(op, lanes, row) for lanes in (operands[index], tuple(t.cpu() for t in found)))
            dtypes = tuple(each.dtype for each in found)
            text = (
                f"operator {op.name!r} changes its operands\n  launcher: {self.name}, types: {names_of(dtypes)}\n"
                f"  operand {index} of {len(operands)}, lane {lane}: before {was[lane]}, after {now[lane]}"
            )
            results = (("before", was), ("after", now))
            raise OperatorError(text, law="operands unchanged", launcher=self.name, dtypes=dtypes, results=results)


def _poisoned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that shows where nothing was written."""
    if dtype == torch.bool:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.full((numel * dtype.itemsize,), _POISON, dtype=torch.uint8, device=device).view(dtype)

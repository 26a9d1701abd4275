"""Where a rank's own value of each piece of a chunk lies while a plan is lowered: the data, or the wire buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from microddp.plan.instructions import WIRE, Copy, Instruction, Span
from microddp.schedule import OWN, Schedule, Step

__all__ = ["OwnValues"]


class OwnValues:
    """Follows the own values of one rank, and appends the conversions that they need to ``out``.

    Without a wire type they always lie in the data. With one, a piece is in the data as it came from the caller until
    it is first sent or replaced; from then on it is in the wire buffer, at the same place; the result goes back.
    """

    def __init__(
        self, schedule: Schedule, rank: int, steps: Sequence[Step], out: list[Instruction], *, wire: bool
    ) -> None:
        self._out, self._wire = out, wire
        self._on_wire: set[tuple[int, int]] = set()  # (chunk, piece)
        self._due: list[Copy] = []
        self._completed_by: dict[int, list[int]] = {}  # step -> the chunks whose result it makes
        last_write = {
            chunk: number
            for number, step in enumerate(steps)
            for chunk in (*(each.chunk for each in step.receives if each.key == OWN), *(f.chunk for f in step.folds))
        }
        for chunk in schedule.result_chunks(rank):
            if wire and chunk in last_write:
                self._completed_by.setdefault(last_write[chunk], []).append(chunk)

    def read(self, step: int, piece: int, chunk: int, data: Span, *, travels: bool = False) -> Span:
        """Where the value lies now; with ``travels`` it is converted to the wire type first, unless it has that."""
        if not self._wire:
            return data
        on_wire = Span(WIRE, data.start, data.stop)
        if (chunk, piece) not in self._on_wire:
            if not travels:
                return data
            self._out.append(Copy(step, piece, on_wire, data))
            self._on_wire.add((chunk, piece))
        return on_wire

    def write(self, step: int, piece: int, chunk: int, data: Span) -> Span:
        """Where a new value goes."""
        if not self._wire:
            return data
        self._on_wire.add((chunk, piece))
        return Span(WIRE, data.start, data.stop)

    def complete(self, step: int, piece: int, data_of: Callable[[int, int], Span | None]) -> None:
        """After the last step that writes them, results are to go back into the data."""
        for chunk in self._completed_by.get(step, ()):
            data = data_of(chunk, piece)
            if data:
                self._due.append(Copy(step, piece, data, Span(WIRE, data.start, data.stop)))

    def restore(self) -> None:
        """Emits the copies of the results that are complete."""
        self._out += self._due
        self._due.clear()

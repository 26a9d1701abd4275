"""One rank's memory while its plan is proved: for each element, which element of the tensor it is and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from microddp.errors import PlanError
from microddp.plan.instructions import DATA, Combine, Plan, RecvCombine, Span
from microddp.schedule import Schedule
from microddp.schedule.terms import Overlap, Terms

__all__ = ["NOTHING", "Memory", "Token"]

Token = tuple[int, int]
"""(element of the tensor, term of the contributions): so that data which lands one element off is told apart."""

NOTHING: Final[Token] = (-1, -1)
"""What staging holds before it is written, and the tensor where a rank starts without data."""


class Memory:
    """The buffers of a plan, filled with tokens.

    Attributes:
        weighed: for each fold with weights, the weights stated and the numbers of contributions really combined.
    """

    def __init__(self, schedule: Schedule, plan: Plan, terms: Terms) -> None:
        self.plan, self.terms = plan, terms
        self.buffers = [[NOTHING] * buffer.numel for buffer in plan.buffers]
        self.weighed: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for chunk in _chunks_at_start(schedule, plan.rank):
            for element in range(*schedule.chunk_span(chunk, plan.numel, plan.itemsize)):
                self.buffers[DATA][element] = element, terms.leaf(plan.rank)

    def read(self, span: Span, *, folding: bool = False) -> list[Token]:
        """What ``span`` holds. Raises PlanError if that is nothing yet, or lies outside."""
        tokens = self._buffer(span, folding=folding)[span.start : span.stop]
        if NOTHING in tokens:
            raise PlanError(f"rank {self.plan.rank} reads {span}, which holds nothing yet")
        return tokens

    def write(self, span: Span, tokens: Sequence[Token], *, folding: bool = False) -> None:
        """Overwrites ``span``. Raises PlanError if it lies outside or has another length."""
        buffer = self._buffer(span, folding=folding)
        if len(tokens) != len(span):
            raise PlanError(f"rank {self.plan.rank} writes {len(tokens)} elements into {span}")
        buffer[span.start : span.stop] = tokens

    def fold(self, instruction: Combine | RecvCombine, arrival: Sequence[Token] | None = None) -> None:
        """Does a fold; ``arrival`` is what a RecvCombine receives.

        Raises:
            PlanError: operands of different elements or lengths, a contribution counted twice, or a division too early.
        """
        held = [arrival if each is None else self.read(each, folding=True) for each in instruction.operands]
        operands = [each for each in held if each is not None]
        if {len(each) for each in operands} != {len(instruction.out)} or len(operands) != len(held):
            raise PlanError(f"rank {self.plan.rank} folds spans of different lengths: {instruction}")
        folded = [self._fold_element(instruction, column) for column in zip(*operands)]
        self.write(instruction.out, folded, folding=True)

    def _fold_element(self, instruction: Combine | RecvCombine, column: Sequence[Token]) -> Token:
        elements, values = zip(*column)
        if len(set(elements)) > 1:
            raise PlanError(f"rank {self.plan.rank} folds elements {elements} of the tensor together: {instruction}")
        first = instruction.operands[0]
        if first is not None and self.plan.buffers[first.buffer].wide:
            # What an accumulator holds was not rounded: this fold only goes on.
            values = (*self.terms.operands(values[0]), *values[1:])
        try:
            term = self.terms.fold(values)
        except Overlap as overlap:
            text = f"counts the contributions of ranks {overlap.ranks} twice"
            raise PlanError(f"rank {self.plan.rank} {text}: {instruction}") from None
        if instruction.weights is not None:
            counts = tuple(bin(self.terms.mask(each)).count("1") for _, each in column)
            self.weighed.add((instruction.weights, counts))
        return elements[0], term if instruction.divisor is None else self._divided(term, instruction)

    def _divided(self, term: int, instruction: Combine | RecvCombine) -> int:
        world_size = self.plan.world_size
        if instruction.divisor != world_size or self.terms.mask(term) != (1 << world_size) - 1:
            raise PlanError(f"rank {self.plan.rank} divides by {instruction.divisor} too early: {instruction}")
        return self.terms.fold([term])

    def _buffer(self, span: Span, *, folding: bool) -> list[Token]:
        if self.plan.buffers[span.buffer].wide and not folding:
            raise PlanError(f"rank {self.plan.rank} moves {span} of an accumulator, which only folds may touch")
        buffer = self.buffers[span.buffer]
        if not 0 <= span.start < span.stop <= len(buffer):
            raise PlanError(f"rank {self.plan.rank} uses {span} of a buffer of {len(buffer)} elements")
        return buffer


def _chunks_at_start(schedule: Schedule, rank: int) -> Sequence[int]:
    if schedule.collective == "all_gather":
        return (rank,)
    return () if schedule.collective == "broadcast" and rank != schedule.root else range(schedule.num_chunks)

"""What a plan is made of: spans of buffers, and instructions that read and write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "ARRIVAL",
    "DATA",
    "WIRE",
    "Buffer",
    "Combine",
    "Copy",
    "Instruction",
    "Plan",
    "Recv",
    "RecvCombine",
    "Send",
    "Span",
    "Transfer",
    "is_transfer",
]

DATA: Final = 0
"""The index of the buffer that is the caller's tensor."""

WIRE: Final = 1
"""The index of the buffer that holds a rank's own values as they travel, in a plan that has a wire type."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A stretch of memory.

    Attributes:
        name: "data", "wire", the slots "A", "B", "C" …, or "acc", "acc1" … for partial folds in the accumulation type.
        numel: its size in elements.
        wide: its elements have the accumulation type, not the type that travels, which slots and "wire" have.
    """

    name: str
    numel: int
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [start, stop) of buffer number ``buffer``; never empty in an instruction."""

    buffer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


ARRIVAL: Final = None
"""Stands among a RecvCombine's operands for what arrives."""


@dataclass(frozen=True, slots=True)
class Send:
    """Sends ``source`` to ``peer``."""

    step: int
    slice: int
    peer: int
    source: Span


@dataclass(frozen=True, slots=True)
class Recv:
    """Fills ``out`` with what ``peer`` sends."""

    step: int
    slice: int
    peer: int
    out: Span


@dataclass(frozen=True, slots=True)
class RecvCombine:
    """Folds what ``peer`` sends (``ARRIVAL``) with the other operand into ``out``, without staging it."""

    step: int
    slice: int
    peer: int
    out: Span
    operands: tuple[Span | None, ...]
    weights: tuple[int, ...] | None = None
    divisor: int | None = None


@dataclass(frozen=True, slots=True)
class Combine:
    """``out`` = left fold of ``operands``; ``weights`` and ``divisor`` as in the kernels' CombineSpec."""

    step: int
    slice: int
    out: Span
    operands: tuple[Span, ...]
    weights: tuple[int, ...] | None = None
    divisor: int | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """``out`` = ``source``, converted between the data's type and the wire's."""

    step: int
    slice: int
    out: Span
    source: Span


Transfer = Send | Recv | RecvCombine
Instruction = Send | Recv | RecvCombine | Combine | Copy


def is_transfer(instruction: Instruction) -> bool:
    """Whether a peer takes part in it."""
    return isinstance(instruction, (Send, Recv, RecvCombine))


def reads(instruction: Instruction) -> tuple[Span, ...]:
    """The spans that an instruction reads on this rank."""
    if isinstance(instruction, (Send, Copy)):
        return (instruction.source,)
    if isinstance(instruction, Recv):
        return ()
    return tuple(each for each in instruction.operands if each is not None)


def writes(instruction: Instruction) -> tuple[Span, ...]:
    """The spans that an instruction writes on this rank."""
    return () if isinstance(instruction, Send) else (instruction.out,)


@dataclass(frozen=True)
class Plan:
    """One rank's instructions for one size.

    Attributes:
        rank, world_size: whose plan, among how many.
        numel, itemsize: of the caller's tensor; with several lanes or a wire type, the rows and the smallest itemsize.
        buffers: ``buffers[0]`` is the caller's tensor, the others are staging.
        instructions: in the order in which a host issues them.
        after: for each instruction, the indices of those that must be complete before it starts: no more than the
            spans demand, transitively reduced.
        slice_numel: elements of a full slice.
    """

    rank: int
    world_size: int
    numel: int
    itemsize: int
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    after: tuple[tuple[int, ...], ...]
    slice_numel: int

    @property
    def writes_data(self) -> bool:
        """Whether the caller's tensor is written at all."""
        return any(span.buffer == DATA for each in self.instructions for span in writes(each))

    def staging_nbytes(self, wide_itemsize: int) -> int:
        """Bytes of staging: slots in the data's type, accumulators in the accumulation type."""
        return sum(each.numel * (wide_itemsize if each.wide else self.itemsize) for each in self.buffers[1:])

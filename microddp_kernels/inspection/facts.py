"""What is known of a compiled kernel, and the rules that it must keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Case", "InspectionError", "KernelFacts", "KernelFailure"]


class InspectionError(Exception):
    """A kernel could not be compiled, or the process that compiled it ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One launch to compile.

    Attributes:
        arch: the compute capability, 90 for sm_90.
        kernel: what is launched: "combine", "fold", ...; see ``microddp_kernels.inspection.cases``.
        operator: an operator's name, ``"module:attribute"``, or "" for kernels that have none.
        dtypes: the element types, by name; of an operator's lanes, or of result and source.
    """

    arch: int
    kernel: str
    operator: str
    dtypes: tuple[str, ...]

    @property
    def text(self) -> str:
        """``combine of sum, float32, sm_90``."""
        of = f" of {self.operator}" if self.operator else ""
        return f"{self.kernel}{of}, {', '.join(self.dtypes)}, sm_{self.arch}"


@dataclass(frozen=True, slots=True)
class KernelFailure:
    """A case that could not be compiled, and why."""

    case: Case
    error: str

    def violations(self) -> tuple[str, ...]:
        """One: that it does not compile."""
        return ("does not compile",)


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """A compiled kernel. Widths, bytes and accesses are those of one program whose block is full.

    Attributes:
        case: what was compiled.
        function: the name of the Triton kernel.
        registers: of a thread.
        spills: machine instructions that load or store local memory; None: the machine code was not read.
        spills_in_tail_only: a full block is known to execute none of them.
        stack: bytes of local memory of a thread.
        shared: bytes of shared memory of a program.
        load_bits, store_bits: the width of the narrowest access to the tensors; 0: there is none.
        narrow: loads and stores that are narrower than they can be (see ``violations``).
        bytes_per_element: of global memory asked for, per element of the first lane (a row, if a lane is wide). What
            the threads of one instruction ask for twice counts once, what two instructions ask for counts twice.
        minimum_bytes: the same if every operand is read once and the result written once.
        moves_minimum: whether that is so. If a lane is wide, only wide lanes are judged in this and in ``narrow``.
        instructions_per_16_bytes: machine instructions of a thread for 16 bytes that it stores; None: not read.
        whole_kernel: the instructions are those of the whole kernel, because the way through a full block could not be
            told apart.
        fused: fused multiply-adds of floats in the PTX of the whole kernel.
        contracted: those that nobody asked for: made out of a multiplication and an addition.
        float_instructions: the instructions on floats in the PTX of the whole kernel, each once, sorted.
        offset_bits: of the narrowest offsets that are added to pointers, each thread its own; 32 reach 2**31 elements.
        untraced: why no widths and bytes are known; "" if they are.
    """

    case: Case
    function: str
    registers: int
    spills: int | None
    spills_in_tail_only: bool
    stack: int
    shared: int
    load_bits: int
    store_bits: int
    narrow: int
    bytes_per_element: float
    minimum_bytes: float
    moves_minimum: bool
    instructions_per_16_bytes: float | None
    whole_kernel: bool
    fused: int
    contracted: int
    float_instructions: tuple[str, ...]
    offset_bits: int
    untraced: str = ""

    def violations(self) -> tuple[str, ...]:
        """The rules that it breaks, as texts; none if all is well.

        Every thread accesses a tensor in 128-bit pieces, or, if its whole share of the tensor is less, in one piece;
        copies of tensors that are not contiguous excepted. Nothing is spilled and no stack used. No multiplication and
        addition is contracted. Every byte is moved once.
        """
        return tuple(self._violations())

    def _violations(self) -> Iterator[str]:
        if self.untraced:
            yield f"cannot be followed: {self.untraced}"
        if self.narrow and self.case.kernel not in STRIDED:
            yield f"{self.narrow} accesses narrower than 128 bits (loads {self.load_bits}, stores {self.store_bits})"
        if self.spills:
            place = " (none of them in a full block)" if self.spills_in_tail_only else ""
            yield f"{self.spills} spilling instructions{place}"
        if self.stack:
            yield f"{self.stack} bytes of stack"
        if self.offset_bits < 64:
            yield f"offsets of {self.offset_bits} bits"
        if self.contracted:
            yield f"{self.contracted} contracted multiply-adds"
        if not self.untraced and not self.moves_minimum:
            yield f"moves {self.bytes_per_element:g} bytes an element, not {self.minimum_bytes:g}"

    def as_dict(self) -> dict[str, Any]:
        """All attributes and the violations, for JSON."""
        return {**asdict(self), "violations": list(self.violations())}


STRIDED = frozenset({"strided"})
"""The kernels whose tensors are not contiguous, so that the width of accesses is not theirs to choose."""

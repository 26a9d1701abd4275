"""Reads the machine code of a kernel (SASS): spills, and the instructions of the shortest way through a full block."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Instruction", "Resources", "Signature", "disassemble", "parse_sass", "resources", "shortest_way"]

Signature = tuple[tuple[str, int, int], ...]
"""The accesses of global memory on a way through the code, sorted: ("load" or "store", bytes, how many)."""

_LINE: Final = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL: Final = re.compile(r"^(\.L_x_\d+|[$\w]+):")
_TARGET: Final = re.compile(r"`\(([^)]+)\)")
_WIDTHS: Final = {"8": 1, "16": 2, "64": 8, "128": 16, "256": 32}
_ENDS: Final = frozenset({"EXIT", "RET", "KILL", "BPT"})
_MAX_WAYS: Final = 5000
_TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: with its modifiers, ``LDG.E.128``.
        operands: as written.
        guard: its predicate, ``P0`` or ``!P0``, or None.
        labels: those that stand before it.
    """

    opcode: str
    operands: str
    guard: str | None
    labels: tuple[str, ...]

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def spills(self) -> bool:
        """Whether it loads or stores local memory."""
        return self.name in ("LDL", "STL")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel occupies: registers of a thread, bytes of stack of a thread, bytes of shared memory."""

    registers: int
    stack: int
    shared: int


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def resources(cubin: Path) -> Resources:
    """What the assembler says that the kernel occupies. Raises RuntimeError if the file cannot be read."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", _tool("cuobjdump", "-res-usage", str(cubin)))
    if found is None:
        raise RuntimeError("cuobjdump names no registers")
    registers, stack, shared, local = map(int, found.groups())
    return Resources(registers, stack + local, shared)


def disassemble(cubin: Path) -> list[Instruction]:
    """The machine code. Raises RuntimeError if the file cannot be read."""
    return parse_sass(_tool("nvdisasm", "-c", str(cubin)))


def parse_sass(text: str) -> list[Instruction]:
    """The instructions that ``nvdisasm -c`` prints, without the padding at the end."""
    found: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels.append(label[1])
        elif instruction := _LINE.match(line):
            guard = None if instruction[1] in (None, "PT", "UPT") else instruction[1]
            found.append(Instruction(instruction[2], instruction[3].strip(), guard, tuple(labels)))
            labels = []
    while found and found[-1].name == "NOP":
        found.pop()
    if found and found[-1].name == "BRA" and _target(found[-1]) in found[-1].labels:
        found.pop()  # the trap behind the end
    return found


def shortest_way(code: list[Instruction], signature: Signature, spill_cost: int = 1) -> int | None:
    """The fewest instructions from entry to exit on which exactly these accesses of global memory are made.

    Subroutines, which only slow paths of divisions call, count as the call alone. None if there is no such way, or if
    the way leads through a loop or a jump whose target is not written down. An instruction that spills counts as
    ``spill_cost``: if that changes nothing, there is none on a shortest way.
    """
    try:
        ways = _Ways(code, spill_cost).from_start()
    except _Unclear:
        return None
    return ways.get(signature)


class _Unclear(Exception):
    """The control flow cannot be read off the code."""


_Place = tuple[int, tuple[tuple[str, str], ...]]
"""An instruction, and for each convergence barrier that is set the label at which it lets threads go on."""


class _Ways:
    """For each place: the fewest instructions from it to an exit, by the accesses made on the way."""

    def __init__(self, code: list[Instruction], spill_cost: int) -> None:
        self.code, self.spill_cost = code, spill_cost
        self.positions = {label: index for index, each in enumerate(code) for label in each.labels}
        self.known: dict[_Place, dict[Signature, int]] = {}
        self.unfinished: set[_Place] = set()

    def from_start(self) -> dict[Signature, int]:
        """Depth first, without recursion: a place is finished after all that can follow it."""
        start: _Place = (0, ())
        stack = [start]
        while stack:
            place = stack[-1]
            if place in self.known:
                stack.pop()
                continue
            following = list(self._following(place))
            waiting = [each for each in following if each is not None and each not in self.known]
            if not waiting:
                self.known[place] = self._joined(place[0], following)
                self.unfinished.discard(place)
                stack.pop()
                continue
            self.unfinished.add(place)
            if any(each in self.unfinished for each in waiting):
                raise _Unclear("a loop")
            stack.extend(waiting)
        return self.known[start]

    def _joined(self, index: int, following: list[_Place | None]) -> dict[Signature, int]:
        own, cost = _access_of(self.code[index]), self.spill_cost if self.code[index].spills else 1
        ways: dict[Signature, int] = {}
        for each in following:
            for signature, count in ({(): 0} if each is None else self.known[each]).items():
                longer = _with(signature, own)
                ways[longer] = min(count + cost, ways.get(longer, count + cost))
        if len(ways) > _MAX_WAYS:
            raise _Unclear("too many ways")
        return ways

    def _following(self, place: _Place) -> Iterator[_Place | None]:
        """The places that can come next; None: the program ends."""
        index, barriers = place
        each = self.code[index]
        goes_on = each.guard is not None
        if each.name in _ENDS:
            yield None
        elif each.name in ("BRA", "JMP"):
            yield self._position(_target(each)), barriers
            goes_on = goes_on or not each.operands.startswith("`")  # a condition stands before the target
        elif each.name == "BSYNC":
            label = dict(barriers).get(each.operands)
            yield self._position(label), tuple(item for item in barriers if item[0] != each.operands)
        elif each.name in ("BRX", "BREAK", "JMX", "LEPC", "RPCMOV"):
            raise _Unclear(each.opcode)
        else:
            goes_on = True
            if each.name == "BSSY":
                barriers = _set(barriers, each.operands.partition(",")[0], _target(each))
        if goes_on:
            if index + 1 == len(self.code):
                raise _Unclear("the code runs out of its end")
            yield index + 1, barriers

    def _position(self, label: str | None) -> int:
        if label is None or label not in self.positions:
            raise _Unclear(f"no label {label}")
        return self.positions[label]


def _set(barriers: tuple[tuple[str, str], ...], name: str, label: str | None) -> tuple[tuple[str, str], ...]:
    if label is None:
        raise _Unclear("a barrier without a label")
    return tuple(sorted((dict(barriers) | {name: label}).items()))


def _target(instruction: Instruction) -> str | None:
    found = _TARGET.search(instruction.operands)
    return found[1] if found else None


def _access_of(instruction: Instruction) -> tuple[str, int] | None:
    """Whether and how many bytes of global memory it loads or stores."""
    if instruction.name not in ("LDG", "STG"):
        return None
    modifiers = {each.lstrip("US") for each in instruction.opcode.split(".")[1:]}
    width = next((nbytes for bits, nbytes in _WIDTHS.items() if bits in modifiers), 4)
    return ("load" if instruction.name == "LDG" else "store"), width


def _with(signature: Signature, access: tuple[str, int] | None) -> Signature:
    if access is None:
        return signature
    counts = Counter({(kind, nbytes): count for kind, nbytes, count in signature})
    counts[access] += 1
    return tuple(sorted((kind, nbytes, count) for (kind, nbytes), count in counts.items()))

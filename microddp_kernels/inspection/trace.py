"""Executes one program of a kernel's PTX, all threads at once, and records which bytes of global memory it asks for.

Integers are computed exactly; floats, and whatever is loaded from tensors, are unknown and stay so. Addresses and
conditions hardly ever depend on them. Where one does, or where the PTX does something that is not modelled here, the
program cannot be followed, and ``Untraceable`` says why: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from microddp_kernels.inspection.integers import (
    ARITHMETIC,
    Array,
    Value,
    compare,
    convert,
    funnel_shifted,
    joined,
    masked,
    parted,
    wide_product,
    width_of,
)
from microddp_kernels.inspection.joins import JUMPS, join_after
from microddp_kernels.inspection.ptx import Kernel, Statement

__all__ = ["Access", "Untraceable", "trace"]

_MAX_STATEMENTS: Final = 200_000
_INTEGER: Final = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_PLACE: Final = re.compile(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_INTEGER_TYPE: Final = re.compile(r"^[bsu]\d+$|^pred$")
_IGNORED: Final = frozenset({"bar", "barrier", "fence", "griddepcontrol", "membar", "nanosleep", "prefetch"})
_UNMODELLED: Final = frozenset({"atom", "brx", "call", "cp", "multimem", "red", "suld", "sust", "tex", "trap"})


class Untraceable(Exception):
    """A program cannot be followed; the text says at which instruction, and why."""


@dataclass(frozen=True, slots=True)
class Access:
    """One executed load from global memory, or store to it.

    Attributes:
        is_store: a store, not a load.
        nbytes: of one thread.
        addresses: of the threads that take part, in bytes.
    """

    is_store: bool
    nbytes: int
    addresses: tuple[int, ...]

    @property
    def distinct_nbytes(self) -> int:
        """The bytes that all threads ask for, each counted once."""
        starts = np.unique(np.array(self.addresses, dtype=np.uint64))
        gaps = np.minimum(np.diff(starts), np.uint64(self.nbytes))
        return int(gaps.sum()) + self.nbytes


def trace(
    kernel: Kernel,
    arguments: Sequence[int | None],
    *,
    num_threads: int,
    program: int,
    num_programs: int,
    memory: Mapping[int, bytes],
) -> list[Access]:
    """The accesses of global memory, in the order of execution.

    Args:
        kernel: the PTX.
        arguments: the values of its first parameters; None: not known, such as floats.
        num_threads: of a program.
        program: which of the ``num_programs`` is executed.
        memory: contents that are known (tables), by address.

    Raises:
        Untraceable: the program cannot be followed.
    """
    machine = _Machine(kernel, arguments, num_threads, (program, num_programs), memory)
    machine.run()
    return machine.accesses


class _Machine:
    def __init__(
        self,
        kernel: Kernel,
        arguments: Sequence[int | None],
        num_threads: int,
        grid: tuple[int, int],
        memory: Mapping[int, bytes],
    ) -> None:
        self.kernel, self.num_threads, self.memory = kernel, num_threads, memory
        self.accesses: list[Access] = []
        self.num_executed = 0
        self.registers: dict[str, Value] = {
            "%tid.x": np.arange(num_threads, dtype=np.uint64),
            "%ntid.x": self._all(num_threads),
            "%ctaid.x": self._all(grid[0]),
            "%nctaid.x": self._all(grid[1]),
            "%laneid": np.arange(num_threads, dtype=np.uint64) % np.uint64(32),
            **{f"%{name}.{axis}": self._all(0) for name in ("tid", "ctaid") for axis in "yz"},
            **{f"%{name}.{axis}": self._all(1) for name in ("ntid", "nctaid") for axis in "yz"},
        }
        self.parameters: dict[str, Value] = {
            name: None if value is None else self._all(value) for name, value in zip(kernel.parameters, arguments)
        }

    def _all(self, value: int) -> Array:
        return np.full(self.num_threads, value & ((1 << 64) - 1), dtype=np.uint64)

    def run(self, position: int = 0, stop: int | None = None) -> None:
        """Executes from a statement on, up to another or the end of the program."""
        while position < len(self.kernel.statements) and position != stop:
            self.num_executed += 1
            if self.num_executed > _MAX_STATEMENTS:
                raise Untraceable(f"the program has not ended after {_MAX_STATEMENTS} instructions")
            statement = self.kernel.statements[position]
            active = self._active(statement)
            if statement.opcode.partition(".")[0] not in JUMPS:
                self._execute(statement, active)
                position += 1
            elif active is None or len(set(active.tolist())) > 1:
                position = self._execute_both(position, statement)
            elif not active[0]:
                position += 1
            elif statement.opcode.startswith("bra"):
                position = self.kernel.labels[statement.operands[0]]
            else:
                position = len(self.kernel.statements)

    def _execute_both(self, position: int, statement: Statement) -> int:
        """Goes both ways of a branch that some threads may take and others not, up to where the ways meet.

        Registers in which the ways differ are unknown from there on. Returns the statement where they meet.
        """
        join = join_after(self.kernel, position)
        if join is None or not statement.opcode.startswith("bra"):
            raise Untraceable(f"{_text(statement)}: some threads may end here and others not")
        before, num_accesses = dict(self.registers), len(self.accesses)
        self.run(self.kernel.labels[statement.operands[0]], join)
        taken, self.registers = self.registers, before
        self.run(position + 1, join)
        if len(self.accesses) > num_accesses:
            raise Untraceable(f"{_text(statement)}: whether memory is accessed depends on data")
        for name in {*taken, *self.registers}:
            first, second = taken.get(name), self.registers.get(name)
            if first is None or second is None or not np.array_equal(first, second):
                self.registers[name] = None
        return join

    def _active(self, statement: Statement) -> Value:
        """Which threads execute the statement: 0 or 1 for each."""
        if statement.guard is None:
            return self._all(1)
        guard = self.registers.get(statement.guard)
        return guard if guard is None or not statement.negated else guard ^ np.uint64(1)

    def _execute(self, statement: Statement, active: Value) -> None:
        name, *modifiers = statement.opcode.split(".")
        if name in _IGNORED:
            return
        if name in _UNMODELLED:
            raise Untraceable(f"{_text(statement)}: this instruction is not modelled")
        if name in ("ld", "st"):
            self._move(statement, modifiers, active)
            return
        target = statement.operands[0]
        if name == "mov" and target.startswith("{"):
            names, whole = _elements(target), self._value(statement.operands[1])
            parts = [None] * len(names) if whole is None else parted(whole, len(names), modifiers[-1])
            self._assign(names, parts, active)
        else:
            is_register = not re.search(r"[{|]", target)
            value = self._computed(statement, name, modifiers) if is_register else None
            self._assign([target], [value], active)

    def _assign(self, names: Iterable[str], values: Iterable[Value], active: Value) -> None:
        for name, value in zip(names, values):
            for each in _elements(name) if value is None else [name]:
                old = self.registers.get(each)
                if active is not None and active.all():
                    self.registers[each] = value
                elif active is None or old is None or value is None:
                    self.registers[each] = None
                else:
                    self.registers[each] = np.where(active, value, old)

    def _computed(self, statement: Statement, name: str, modifiers: list[str]) -> Value:
        """The result of an instruction on registers, or None if it is not known."""
        kinds = [each for each in modifiers if _INTEGER_TYPE.match(each) and each != "b128"]
        operands = [self._value(part) for each in statement.operands[1:] for part in _elements(each)]
        known = [each for each in operands if each is not None]
        if not kinds or len(known) < len(operands) or any(each.startswith(("f", "bf")) for each in modifiers):
            return None
        bits = width_of(kinds[0])
        if name == "mov" or name == "cvta":
            return known[0] if len(known) == 1 else joined(known, kinds[0])
        if name == "shf":
            return funnel_shifted(known[0], known[1], known[2], modifiers[0], modifiers[1])
        if name == "not":
            return masked(~known[0], bits)
        if name == "neg":
            return masked(np.uint64(0) - known[0], bits)
        if name == "selp":
            chosen: Array = np.where(known[2], known[0], known[1])
            return chosen
        if name == "setp":
            return compare(modifiers[0], kinds[0], known[0], known[1]) if len(modifiers) == 2 else None
        if name == "cvt":
            return convert(known[0], kinds[0], kinds[1]) if len(kinds) == 2 and len(modifiers) == 2 else None
        return self._arithmetic(name, modifiers, kinds[0], known)

    def _arithmetic(self, name: str, modifiers: list[str], kind: str, known: list[Array]) -> Value:
        if {"cc", "sat"} & set(modifiers):
            return None
        if name in ("mul", "mad") and "wide" in modifiers:
            product, bits = wide_product(known[0], known[1], kind), 2 * width_of(kind)
        elif name in ("mul", "mad"):
            product, bits = ARITHMETIC[f"mul.{modifiers[0]}"](known[0], known[1], kind), width_of(kind)
        elif name == "bfe" and kind[0] == "u":
            field: Array = masked(known[0] >> known[1], width_of(kind)) & ((np.uint64(1) << known[2]) - np.uint64(1))
            return field
        elif name in ARITHMETIC and len(known) == 2:
            return masked(ARITHMETIC[name](known[0], known[1], kind), width_of(kind))
        else:
            return None
        return masked(product + known[2] if name == "mad" else product, bits)

    def _value(self, operand: str) -> Value:
        if _INTEGER.match(operand):
            return self._all(int(operand.rstrip("U"), 0))
        return self.registers.get(operand)

    def _move(self, statement: Statement, modifiers: list[str], active: Value) -> None:
        """A load or store of any memory; what is loaded is unknown, but for parameters and tables."""
        is_store = statement.opcode.startswith("st")
        place, values = statement.operands if is_store else statement.operands[::-1]
        found = _PLACE.match(place)
        names = _elements(values)
        if "param" in modifiers and found is not None:
            value = self.parameters.get(found[1]) if found[2] is None else None
            self._assign(names, [value] * len(names), active)
        elif {"shared", "local"} & set(modifiers) or "shared::cta" in modifiers:
            if not is_store:
                self._assign(names, [None] * len(names), active)
        elif "global" in modifiers and found is not None:
            loaded = self._access(statement, modifiers, (found[1], found[2]), active)
            if not is_store:
                self._assign(names, loaded if len(names) == 1 else [None] * len(names), active)
        else:
            raise Untraceable(f"{_text(statement)}: this kind of memory is not modelled")

    def _access(
        self, statement: Statement, modifiers: list[str], place: tuple[str, str | None], active: Value
    ) -> list[Value]:
        base = self.registers.get(place[0])
        if base is None or active is None:
            raise Untraceable(f"{_text(statement)}: {'the address' if base is None else 'the guard'} depends on data")
        count = next((int(each[1:]) for each in modifiers if re.match(r"v\d$", each)), 1)
        kind = next(each for each in reversed(modifiers) if re.match(r"[bsuf]\d+$", each))
        nbytes = count * width_of(kind) // 8
        addresses = base + np.uint64(int(place[1] or "0", 0) & ((1 << 64) - 1))
        chosen = tuple(addresses[active.astype(bool)].tolist())
        if chosen:
            self.accesses.append(Access(statement.opcode.startswith("st"), nbytes, chosen))
        return [self._known_content(addresses, nbytes)]

    def _known_content(self, addresses: Array, nbytes: int) -> Value:
        contents = []
        for address in addresses.tolist():
            for start, content in self.memory.items():
                if start <= address and address + nbytes <= start + len(content):
                    contents.append(int.from_bytes(content[address - start :][:nbytes], "little"))
                    break
            else:
                return None
        return np.array(contents, dtype=np.uint64)


def _elements(operand: str) -> list[str]:
    """The registers of a vector in braces, or the one register."""
    return [each.strip() for each in re.split(r"[,|]", operand.strip("{} ")) if each.strip()]


def _text(statement: Statement) -> str:
    guard = f"@{'!' if statement.negated else ''}{statement.guard} " if statement.guard else ""
    return f"{guard}{statement.opcode} {', '.join(statement.operands)}"

"""Reads PTX: the statements of a kernel in order, and where its labels stand."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Kernel", "Statement", "parse_kernel"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE_LINE = re.compile(r"^\s*\.(?:loc|file|section|pragma)\b[^\n]*$", re.MULTILINE)
_LABEL = re.compile(r"^([$%\w]+):(?!:)\s*")
_STATEMENT = re.compile(r"^(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction.

    Attributes:
        opcode: with its modifiers, ``ld.global.v4.b32``.
        operands: as written; of a vector the braces are kept.
        guard: the register of its predicate, or None.
        negated: it is executed where the predicate is false.
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    negated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The body of an entry function: its statements, and for each label the index of the statement that follows."""

    name: str
    parameters: tuple[str, ...]
    statements: tuple[Statement, ...]
    labels: dict[str, int]


def parse_kernel(ptx: str) -> Kernel:
    """The entry function of a PTX module.

    Raises:
        ValueError: it has none, or several, or a statement that cannot be read.
    """
    text = _DIRECTIVE_LINE.sub("", _COMMENT.sub("", ptx))
    entries = list(re.finditer(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\{", text))
    if len(entries) != 1:
        raise ValueError(f"expected PTX with one entry function, found {len(entries)}")
    entry = entries[0]
    parameters = tuple(each.split()[-1] for each in entry[2].split(",") if each.strip())
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    for raw in _body(text, entry.end()).split(";"):
        part = raw.strip()
        while part:
            if part[0] in "{}":  # the scope of a piece of inline assembly: no instruction begins with a brace
                part = part[1:].lstrip()
            elif found := _LABEL.match(part):
                labels[found[1]] = len(statements)
                part = part[found.end() :]
            else:
                break
        if part and not part.startswith("."):
            statements.append(_statement(part))
    return Kernel(entry[1], parameters, tuple(statements), labels)


def _body(text: str, start: int) -> str:
    """What follows an opening brace, up to the brace that closes it."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    raise ValueError("the entry function of the PTX does not end")


def _statement(text: str) -> Statement:
    found = _STATEMENT.match(text)
    if found is None:
        raise ValueError(f"unreadable PTX: {text!r}")
    return Statement(found[3], _operands(found[4]), found[2], bool(found[1]))


def _operands(text: str) -> tuple[str, ...]:
    """Split at the commas that stand in no braces or brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(each for part in parts if (each := part.strip()))

"""Tells the fused multiply-adds that somebody asked for from those that were contracted out of two operations.

Contraction changes the bits: ``a * b + c`` is rounded once instead of twice. Three kinds are in order. Those that the
LLVM IR asks for by name, which come from ``tl.fma`` or from a library function (a logarithm, say). And sums and
products of 16-bit floats that an architecture without such instructions writes as ``a * 1 + b`` and ``a * b - 0``.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from microddp_kernels.inspection.ptx import Kernel, Statement

__all__ = ["count_fused"]

_TYPES: Final = {"f": "f32", "d": "f64"}
_IN_LLVM: Final = re.compile(r"call [^@\n]*@llvm\.(?:nvvm\.)?fma\.([\w.]+)\(")
_ONES: Final = {"f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C003C00, "bf16x2": 0x3F803F80}
_MINUS_ZEROS: Final = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}

_Kind = tuple[str, bool]
"""The type of an element, and whether subnormals are flushed to zero."""


def count_fused(kernel: Kernel, llvm_ir: str) -> tuple[int, int]:
    """The fused multiply-adds of floats in the PTX, and how many of them have been contracted.

    A vector counts as its elements.
    """
    constants = _constants(kernel)
    found: Counter[_Kind] = Counter()
    total = 0
    for statement in kernel.statements:
        name, *modifiers = statement.opcode.split(".")
        kind = modifiers[-1] if modifiers else ""
        if name not in ("fma", "mad") or not re.match(r"b?f\d", kind):
            continue
        count = 2 if kind.endswith("x2") else 1
        total += count
        if not _is_single_operation(statement, kind, constants):
            found[kind.removesuffix("x2"), "ftz" in modifiers] += count
    asked = _asked(llvm_ir, found)
    return total, sum(max(0, count - asked[kind]) for kind, count in found.items())


def _asked(llvm_ir: str, found: Counter[_Kind]) -> Counter[_Kind]:
    """Those that the LLVM IR calls by name.

    A library function calls an instruction twice, with and without flushing, and a later pass keeps one: what was not
    kept was not asked for.
    """
    asked: Counter[_Kind] = Counter()
    for call in _IN_LLVM.finditer(llvm_ir):
        parts = call[1].split(".")
        vector = re.fullmatch(r"v(\d+)(\w+)", parts[-1])
        count, kind = (int(vector[1]), vector[2]) if vector else (1, parts[-1])
        if kind.endswith("x2"):
            count, kind = 2, kind.removesuffix("x2")
        asked[_TYPES.get(kind, kind), "ftz" in parts] += count
    for kind, flushes in list(asked):
        if flushes and found[kind, True]:
            asked[kind, False] = max(0, asked[kind, False] - asked[kind, True])
    return asked


def _constants(kernel: Kernel) -> dict[str, int]:
    """The registers that are nothing but one integer constant."""
    found: dict[str, set[int | None]] = {}
    for statement in kernel.statements:
        if not statement.operands or statement.opcode.startswith("st"):
            continue
        value = statement.operands[1] if statement.opcode.startswith("mov.b") and len(statement.operands) > 1 else ""
        number = int(value, 0) if re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)", value) else None
        for name in re.findall(r"%\w+", statement.operands[0]):
            found.setdefault(name, set()).add(number)
    return {name: number for name, (number, *more) in found.items() if number is not None and not more}


def _is_single_operation(statement: Statement, kind: str, constants: dict[str, int]) -> bool:
    """Whether a multiplicand is 1, or the addend -0."""
    if kind not in _ONES or len(statement.operands) != 4:
        return False
    mask = 0xFFFFFFFF if kind.endswith("x2") else 0xFFFF
    values = [constants.get(each, 0) & mask for each in statement.operands[1:]]
    return _ONES[kind] in values[:2] or values[2] == _MINUS_ZEROS[kind]

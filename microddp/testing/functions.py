"""Which functions without an exact rounding rule an operator's Triton functions call."""

from __future__ import annotations

import dis
import types
from typing import Any, Final

from microddp_kernels.reduce_op import KernelFunction, ReduceOp

__all__ = ["is_exactly_rounded", "uses_libdevice"]

_ROUGHLY_ROUNDED: Final = frozenset(
    {"cos", "erf", "exp", "exp2", "fast_dividef", "fast_expf", "fdiv", "libdevice", "log", "log2"}
    | {"rsqrt", "sigmoid", "sin", "softmax", "sqrt", "tanh", "math"}
)
_ROUGHLY_ROUNDED_ON_A_GPU: Final = frozenset({"/"})


def is_exactly_rounded(op: ReduceOp, launcher: str) -> bool:
    """Whether every launcher must give the same bits as ``launcher``: all that the operator's functions call is exact.

    It is seen from the names that occur in the functions and in those that they call.
    """
    rough = _ROUGHLY_ROUNDED | (_ROUGHLY_ROUNDED_ON_A_GPU if launcher == "compiled" else frozenset())
    return not _names(op) & rough


def uses_libdevice(op: ReduceOp) -> bool:
    """Whether a function of CUDA's libdevice is called, which Triton's interpreter does not know."""
    return "libdevice" in _names(op)


def _names(op: ReduceOp) -> set[str]:
    names: set[str] = set()
    seen: set[types.CodeType] = set()
    for function in (op.combine, op.complex_combine, op.finalize):
        if function is not None:
            _collect(function, names, seen)
    return names


def _collect(function: Any, names: set[str], seen: set[types.CodeType]) -> None:
    if isinstance(function, KernelFunction):
        function = function.load()
    python_function = getattr(function, "fn", function)
    code = getattr(python_function, "__code__", None)
    if code is None or code in seen:
        return
    seen.add(code)
    names.update(code.co_names)
    names.update("/" for each in dis.get_instructions(code) if _divides(each))
    for name in code.co_names:
        found = python_function.__globals__.get(name)
        module = getattr(found, "__name__", "") if isinstance(found, types.ModuleType) else ""
        names.update(module.split("."))
        if hasattr(found, "fn"):  # a Triton function: of the user's, or of triton.language's own
            names.add(getattr(found.fn, "__name__", ""))
            _collect(found, names, seen)
        elif callable(found):
            names.add(getattr(found, "__name__", ""))
        if str(getattr(found, "__module__", "")).endswith(".libdevice"):
            names.add("libdevice")


def _divides(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_TRUE_DIVIDE" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr in ("/", "/=")
    )

"""Runs the Triton kernels on CPU tensors under Triton's interpreter: for tests, and for operators without a torch form.

It works whether or not ``TRITON_INTERPRET`` was set when the kernels were defined. It uses parts of the interpreter
that Triton does not document; it was written for Triton 3.9.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder
from triton.runtime.jit import JITFunction

from microddp_kernels.launchers.base import Launcher
from microddp_kernels.launchers.blocks import combine_on_blocks, copy_on_blocks
from microddp_kernels.launchers.checks import check_devices, lanes_of
from microddp_kernels.launchers.interpreter_builder import METHODS
from microddp_kernels.launchers.packs import make_table, pack_on_blocks
from microddp_kernels.reduce_op import CombineSpec, Values

__all__ = ["InterpreterLauncher"]

_LOCK: Final = threading.Lock()
"""The interpreter patches ``triton.language`` while it runs and keeps the grid position in a global."""

_MAX_BLOCK: Final = 8192


class InterpreterLauncher(Launcher):
    """Slow (milliseconds a launch), and the same bits as the other launchers but for the payload of NaN.

    Launches of all threads run one at a time. While one runs, no thread can compile Triton kernels.

    Args:
        block: elements per program, a power of two.
    """

    name = "interpreter"

    def __init__(self, block: int = _MAX_BLOCK) -> None:
        if block < 1 or block & (block - 1):
            raise ValueError(f"block must be a power of two, got {block}")
        self._block = block

    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec) -> None:
        """``out = how(operands)``, done on return.

        Raises:
            TypeError, ValueError: see ``microddp_kernels.launchers.checks``.
        """
        check_devices(self.name, "cpu", *(lane for each in (out, *operands) for lane in lanes_of(each)))
        combine_on_blocks(_interpret, out, operands, how, self._block, soft_bfloat16=True)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """``out = source``, done on return."""
        check_devices(self.name, "cpu", out, source)
        copy_on_blocks(_interpret, out, source, self._block, soft_bfloat16=True)

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Puts ``sources`` one after another into ``out``, done on return."""
        check_devices(self.name, "cpu", out, *sources)
        pack_on_blocks(_interpret, out, sources, self._block, False, make_table)

    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Cuts ``source`` into ``outs``, done on return."""
        check_devices(self.name, "cpu", source, *outs)
        pack_on_blocks(_interpret, source, outs, self._block, True, make_table)


class _InPlaceExecutor(triton_interpreter.GridExecutor):  # type: ignore[misc]
    """Runs on the tensors themselves.

    Triton's own executor writes the whole storage of every argument back afterwards, which would undo what other
    threads wrote elsewhere in the same storage meanwhile.
    """

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        pass


def _interpret(kernel: Any, num_programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    with _LOCK, _callable_jit_functions(), np.errstate(all="ignore"):  # infinities and NaN are ordinary values here
        interpreted = _interpreted(kernel)
        executor = _InPlaceExecutor(interpreted.rewrite(), interpreted.arg_names, (num_programs,))
        executor(*arguments, **constants)


_interpreted_functions: dict[types.FunctionType, Any] = {}


def _interpreted(function: Any) -> Any:
    """The interpreted form of a ``@triton.jit`` function.

    It is made of a copy with globals of its own, because the interpreter adds names to the globals of what it runs.
    """
    python_function = function.fn
    interpreted = _interpreted_functions.get(python_function)
    if interpreted is None:
        twin = types.FunctionType(
            python_function.__code__,
            dict(python_function.__globals__),
            python_function.__name__,
            python_function.__defaults__,
            python_function.__closure__,
        )
        twin.__kwdefaults__ = python_function.__kwdefaults__
        twin.__annotations__ = python_function.__annotations__
        interpreted = triton_interpreter.InterpretedFunction(twin)
        _interpreted_functions[python_function] = interpreted
    return interpreted


@contextmanager
def _callable_jit_functions() -> Iterator[None]:
    """While the lock is held, a call of a ``@triton.jit`` function (ours, a user's or Triton's) interprets it."""
    compiled_call = JITFunction.__call__
    # Functions of Triton's own library see triton.language.core, which an executor leaves as it is: what is patched are
    # the modules among a function's globals. Here both are, around what the executor patches and restores.
    patches = triton_interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    JITFunction.__call__ = _interpreted_call
    methods = {name: getattr(InterpreterBuilder, name) for name in METHODS}
    for name, method in METHODS.items():
        setattr(InterpreterBuilder, name, method)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(InterpreterBuilder, name, method)
        JITFunction.__call__ = compiled_call
        patches.restore()


def _interpreted_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return _interpreted(function).rewrite()(*args, **kwargs)

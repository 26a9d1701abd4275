"""Launchers run the kernels on one kind of device; ``launcher_for`` chooses."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final

import torch

from microddp_kernels.launchers.base import Launcher
from microddp_kernels.launchers.eager import EagerLauncher

__all__ = ["EagerLauncher", "Launcher", "launcher_for"]

_NAMES: Final = {"cpu": ("eager", "interpreter"), "cuda": ("compiled",)}
"""The launchers of each type of device, the default first."""

_CLASSES: Final = {
    "compiled": ("microddp_kernels.launchers.compiled", "CompiledLauncher"),
    "eager": ("microddp_kernels.launchers.eager", "EagerLauncher"),
    "interpreter": ("microddp_kernels.launchers.interpreter", "InterpreterLauncher"),
}


def launcher_for(device: torch.device, name: str | None = None) -> Launcher:
    """The launcher called ``name`` for tensors of ``device``; by default ``eager`` on the CPU, ``compiled`` on CUDA.

    Triton is imported only for a launcher that needs it.

    Raises:
        ValueError: no launcher has this name, or none works on this device.
        ImportError: the launcher needs Triton, which is not installed.
    """
    legal = _NAMES.get(device.type)
    if legal is None:
        raise ValueError(f"no launcher works on {device}; there are launchers for {' and '.join(_NAMES)}")
    chosen = legal[0] if name is None else name
    if chosen not in legal:
        raise ValueError(f"no launcher {chosen!r} works on {device}; known there: {', '.join(legal)}")
    return _launcher(chosen)


@cache
def _launcher(name: str) -> Launcher:
    module, class_name = _CLASSES[name]
    try:
        launcher_class = getattr(importlib.import_module(module), class_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(f"the {name} launcher needs Triton, which is not installed", name="triton") from error
    launcher: Launcher = launcher_class()
    return launcher

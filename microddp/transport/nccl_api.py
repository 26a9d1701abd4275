"""CuPy's NCCL bindings: finding them, grouping calls, and what their errors mean."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from microddp.errors import TransportError

__all__ = ["MAX_GROUP", "UINT8", "describe_nccl_error", "load_nccl"]

UINT8: Final = 1
"""``ncclUint8``: transfers are bytes, so that every element type travels."""

MAX_GROUP: Final = 256
"""The most transfers in one NCCL group; larger ones were seen to hang (NVIDIA/nccl#2130)."""

_MEANINGS: Final = {
    1: "a CUDA call failed",
    2: "a system call failed",
    3: "NCCL failed internally",
    4: "an argument is invalid",
    5: "invalid use of the library",
    6: "a peer exited, or the network failed",
    7: "an operation is still in progress",
    8: "an operation timed out",
}


def load_nccl() -> Any:
    """The module ``cupy.cuda.nccl``.

    Raises:
        TransportError: CuPy, or its NCCL, is not installed; the text says what to install.
    """
    try:
        importlib.import_module("cupy")
        module: Any = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise TransportError(
            f"the nccl transport needs CuPy, which cannot be imported ({error}): {_remedy()}"
        ) from error
    if not module.available:
        raise TransportError(f"the nccl transport needs NCCL, which CuPy does not find: {_remedy()}")
    return module


def describe_nccl_error(error: BaseException) -> str | None:
    """What an exception out of the bindings says; None if it is not one of theirs.

    CuPy 14 has no text for the results 7 and 8 and raises ``KeyError`` with the number.
    """
    if type(error) is KeyError and error.args in ((7,), (8,)):
        number = int(error.args[0])
        return f"NCCL result {number}: {_MEANINGS[number]}"
    if type(error).__name__ == "NcclError":
        code = getattr(error, "status", None)
        meaning = _MEANINGS.get(code) if isinstance(code, int) else None
        return f"{error}" + (f" (NCCL result {code}: {meaning})" if meaning else "")
    return None


def _remedy() -> str:
    """What to install, exactly: the packages of this project's extras cuda12 and cuda13."""
    version = torch.version.cuda
    major = version.partition(".")[0] if version else None
    if major in ("12", "13"):
        return f"pip install cupy-cuda{major}x nvidia-nccl-cu{major} (this torch is built for CUDA {version})"
    both = "pip install cupy-cuda13x nvidia-nccl-cu13 for CUDA 13, or cupy-cuda12x nvidia-nccl-cu12 for CUDA 12"
    return f"{both}, beside a CUDA build of torch"

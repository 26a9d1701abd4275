"""Small buffers for blockwise work on the CPU, one set per thread, reused by every call."""

from __future__ import annotations

import threading
from typing import Final

import torch

__all__ = ["BLOCK_NUMEL", "block_scratch"]

BLOCK_NUMEL: Final = 32768
"""Elements per block: two float32 buffers of it stay in a core's cache, and torch does not split such calls further."""


class _Buffers(threading.local):
    """The calling thread's buffers; they are freed when the thread ends."""

    def __init__(self) -> None:
        self.by_use: dict[tuple[str, torch.dtype], torch.Tensor] = {}


_buffers = _Buffers()


def block_scratch(use: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A 1-D CPU tensor of ``numel`` (at most ``BLOCK_NUMEL``) elements with undefined values.

    The memory is shared by all calls of this thread with the same ``use`` and ``dtype``, so a caller must be done with
    it before something that it calls asks under the same name.
    """
    buffer = _buffers.by_use.get((use, dtype))
    if buffer is None:
        buffer = _buffers.by_use[use, dtype] = torch.empty(BLOCK_NUMEL, dtype=dtype)
    return buffer[:numel]

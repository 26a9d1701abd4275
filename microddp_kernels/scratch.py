"""Small buffers for blockwise work on the CPU, one set per thread, reused by every call."""

from __future__ import annotations

import threading
from typing import Final

import torch

__all__ = ["BLOCK_NUMEL", "block_scratch"]

BLOCK_NUMEL: Final = 32768
"""Elements per block: two float32 buffers of it stay in a core's cache, and torch does not split such calls further."""

_LARGEST_KEPT: Final = 8 * BLOCK_NUMEL


class _Buffers(threading.local):
    """The calling thread's buffers; they are freed when the thread ends."""

    def __init__(self) -> None:
        self.by_use: dict[tuple[str, torch.dtype], torch.Tensor] = {}


_buffers = _Buffers()


def block_scratch(use: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A 1-D CPU tensor of ``numel`` elements with undefined values.

    The memory is shared by all calls of this thread with the same ``use`` and ``dtype``, so a caller must be done with
    it before something that it calls asks under the same name. More than eight blocks of ``BLOCK_NUMEL`` elements are
    not kept: such a tensor is the caller's alone.
    """
    buffer = _buffers.by_use.get((use, dtype))
    if buffer is None or buffer.numel() < numel:
        buffer = torch.empty(max(numel, BLOCK_NUMEL), dtype=dtype)
        if numel <= _LARGEST_KEPT:
            _buffers.by_use[use, dtype] = buffer
    return buffer[:numel]

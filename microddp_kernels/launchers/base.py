"""The contract of a launcher: how blocks of elements are combined and copied on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from microddp_kernels.reduce_op import CombineSpec

__all__ = ["Launcher"]


class Launcher(ABC):
    """Combines and copies 1-D contiguous tensors of one device.

    Laws: ``out`` and the operands have the same numel (0 is allowed and does nothing) and device; ``out`` may be
    exactly the memory of any operand, never a shifted overlap; element types may differ (a float32 accumulator
    beside 16-bit operands): the fold is computed in the operator's accumulation type and rounded once into ``out``.
    For the built-in operators all launchers give the same bits. Safe to call from several threads.
    """

    name: str = "abstract"

    @abstractmethod
    def combine(self, out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, queue: Any = None) -> Any:
        """``out = how(operands)``, two or more operands. With ``queue`` (a device stream) it only enqueues.

        Returns None if the work is done on return, else an event of the device.
        """

    @abstractmethod
    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Any = None) -> Any:
        """``out = source``, same element type. Returns like ``combine``."""

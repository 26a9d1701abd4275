"""The staging memory of one communicator: allocated once, counted, reused by every collective."""

from __future__ import annotations

import torch

from microddp.plan import Plan

__all__ = ["StagingPool"]

_ALIGNMENT = 256


class StagingPool:
    """Hands out the slots and accumulators of a plan.

    One collective runs at a time, so all plans share one stretch of memory for each device, grown to the largest need.

    Attributes:
        nbytes: held now.
        generation: goes up when memory is replaced, so that views of the old one can be dropped.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.device, torch.Tensor] = {}
        self.generation = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now, over all devices."""
        return sum(block.numel() for block in self._blocks.values())

    def buffers(self, plan: Plan, dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """A 1-D tensor for each staging buffer of the plan, ``plan.buffers[1:]``; contents undefined."""
        offsets, total = [], 0
        for buffer in plan.buffers[1:]:
            offsets.append(total)
            itemsize = wide.itemsize if buffer.wide else dtype.itemsize
            total += -(-buffer.numel * itemsize // _ALIGNMENT) * _ALIGNMENT
        block = self._grown(total, device)
        tensors = []
        for buffer, offset in zip(plan.buffers[1:], offsets, strict=True):
            kind = wide if buffer.wide else dtype
            tensors.append(block[offset : offset + buffer.numel * kind.itemsize].view(kind))
        return tensors

    def poison(self) -> None:
        """Fills the memory with 0xFF bytes (NaN in every float type), so that a stale read shows."""
        for block in self._blocks.values():
            block.fill_(255)

    def release(self) -> None:
        """Lets go of the memory."""
        self._blocks.clear()
        self.generation += 1

    def _grown(self, nbytes: int, device: torch.device) -> torch.Tensor:
        block = self._blocks.get(device)
        if block is None or block.numel() < nbytes:
            self._blocks.pop(device, None)  # freed before its successor is made
            del block
            block = self._blocks[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.generation += 1
        return block

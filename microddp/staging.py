"""The staging memory of one communicator: allocated once, counted, reused by every collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microddp.plan import Plan

__all__ = ["LaneTypes", "StagingPool"]

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LaneTypes:
    """The element types that a plan is run with, for one lane.

    Attributes:
        data: of the caller's tensor.
        wire: what travels: of the slots and the "wire" buffer.
        wide: what folds are computed in: of the accumulators.
        width: elements of this lane for each of the plan's.
    """

    data: torch.dtype
    wire: torch.dtype
    wide: torch.dtype
    width: int = 1


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

    def buffers(self, plan: Plan, lanes: Sequence[LaneTypes], device: torch.device) -> list[list[torch.Tensor]]:
        """For each lane a 1-D tensor for each staging buffer of the plan, ``plan.buffers[1:]``; contents undefined."""
        places, total = [], 0
        for lane in lanes:
            for buffer in plan.buffers[1:]:
                kind = lane.wide if buffer.wide else lane.wire
                nbytes = buffer.numel * lane.width * kind.itemsize
                places.append((total, nbytes, kind))
                total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        block = self._grown(total, device)
        tensors = [block[start : start + nbytes].view(kind) for start, nbytes, kind in places]
        each = len(plan.buffers) - 1
        return [tensors[lane * each : (lane + 1) * each] for lane in range(len(lanes))]

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

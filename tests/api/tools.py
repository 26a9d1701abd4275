"""What the tests of the API share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import microddp
from microddp import Communicator

__all__ = ["ALGORITHMS", "ORDERED", "outcomes", "run", "same_bits"]

ALGORITHMS = ("naive", "tree", "ring", "full_ring", "direct")
ORDERED = ("naive", "full_ring", "direct")
TIMEOUT_S = 30.0


def run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``fn(comm, *args)`` on rank threads."""
    return microddp.run_threads(fn, world_size, args=args, timeout=TIMEOUT_S)


def outcomes(fn: Callable[[Communicator], Any], world_size: int) -> list[Any]:
    """What each rank returned or raised. No rank leaves before all have an outcome."""

    def body(comm: Communicator) -> Any:
        try:
            return fn(comm)
        except Exception as error:
            return error

    return run(body, world_size)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bitwise equality, signs of zeros and payloads of NaN included."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))

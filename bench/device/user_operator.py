"""An operator as a user would write it, in a module of its own: the smaller absolute value."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

import microddp

__all__ = ["absmin"]

_DTYPES: Final = (torch.bfloat16, torch.float32, torch.float64, torch.int32)


@microddp.reduce_op(commutative=True, dtypes=_DTYPES, nan="propagate")
@triton.jit
def absmin(first: Any, second: Any) -> Any:
    """Of two values the smaller absolute value."""
    return tl.minimum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)

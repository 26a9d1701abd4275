"""The arguments with which the Triton launchers start the kernels that move elements."""

from __future__ import annotations

from typing import Any

import torch

from microddp_kernels import copy_kernels
from microddp_kernels.launchers.checks import check_copy
from microddp_kernels.launchers.formats import ACCUMULATION_TYPES, Launch, as_bytes, carried, format_of

__all__ = ["copy_on_blocks"]


def copy_on_blocks(
    launch: Launch,
    out: torch.Tensor,
    source: torch.Tensor,
    block: int,
    soft_bfloat16: bool = False,
    hardware_float8: bool = False,
) -> None:
    """Checks the arguments of a copy and launches its kernel, unless there is nothing to do."""
    check_copy(out, source)
    if out.numel() == 0:
        return
    constants: dict[str, Any] = {"ACC": None, "FORMATS": None, "BLOCK": block}
    if out.dtype == source.dtype:
        out, source = as_bytes(out), as_bytes(source)
    else:
        is_double = torch.float64 in (out.dtype, source.dtype)
        constants["ACC"] = ACCUMULATION_TYPES[torch.float64 if is_double else torch.float32]
        constants["FORMATS"] = tuple(format_of(each.dtype, soft_bfloat16, hardware_float8) for each in (out, source))
        out, source = carried(out, soft_bfloat16), carried(source, soft_bfloat16)
    numel = out.numel()
    launch(copy_kernels.copy_kernel, -(-numel // block), (out, source, numel), constants)

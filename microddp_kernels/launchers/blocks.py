"""The arguments with which the Triton launchers start their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton.language as tl

from microddp_kernels import kernels
from microddp_kernels.launchers.checks import check_copy, check_launch
from microddp_kernels.reduce_op import CombineSpec, KernelFunction

__all__ = ["Launch", "combine_on_blocks", "copy_on_blocks"]

Launch = Callable[[Any, int, tuple[Any, ...], dict[str, Any]], None]
"""``launch(kernel, num_programs, arguments, constants)`` starts a kernel of ``microddp_kernels.kernels``."""

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.bool: tl.int32,
}
"""The accumulation types. Truth values are computed as int32 zeros and ones."""

_CARRIER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _loaded(reference: KernelFunction) -> Any:
    return reference.load()


def combine_on_blocks(
    launch: Launch,
    out: torch.Tensor,
    operands: Sequence[torch.Tensor],
    how: CombineSpec,
    block: int,
    soft_bfloat16: bool,
) -> None:
    """Checks the arguments of a combine and launches its kernel, unless there is nothing to do."""
    accumulation = check_launch(out, operands, how)[0]
    numel = out.numel()
    if numel == 0:
        return
    combine = how.op.combine
    constants = {
        "COMBINE": _loaded(combine) if isinstance(combine, KernelFunction) else combine,
        "ACC": _TRITON_DTYPES[accumulation],
        "IS_BOOL": accumulation == torch.bool,
        "SOFT_BFLOAT16": soft_bfloat16,
        "BLOCK": block,
    }
    pointers = tuple(_carried(operand) for operand in operands)
    num_programs = -(-numel // block)
    if len(pointers) == 2 and how.weights is None and how.divisor is None:
        launch(kernels.combine_kernel, num_programs, (_carried(out), *pointers, numel), constants)
        return
    counts = how.weights or (1,) * len(pointers)
    denominator = how.divisor if how.weights is None else sum(counts)
    constants |= {"WEIGHTED": how.weights is not None, "DIVIDES": denominator is not None}
    # Triton compiles a kernel anew for an integer in a tuple that is 1 or divides by 16, but not for a float.
    weights = tuple(float(count) for count in counts)
    arguments = (_carried(out), pointers, weights, denominator or 1, numel)
    launch(kernels.fold_kernel, num_programs, arguments, constants)


def copy_on_blocks(launch: Launch, out: torch.Tensor, source: torch.Tensor, block: int) -> None:
    """Checks the arguments of a copy and launches its kernel, unless there is nothing to do."""
    check_copy(out, source)
    numel = out.numel()
    if numel == 0:
        return
    carrier = _CARRIER_OF_SIZE[out.element_size()]
    arguments = (out.view(carrier), source.view(carrier), numel)
    launch(kernels.copy_kernel, -(-numel // block), arguments, {"BLOCK": block})


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels take it: bool as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor

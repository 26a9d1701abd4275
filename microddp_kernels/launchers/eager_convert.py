"""Conversions between element types on the CPU, rounding once, by the rules that every launcher keeps."""

from __future__ import annotations

from typing import Final

import torch

from microddp_kernels.scratch import BLOCK_NUMEL

__all__ = ["as_parts", "convert", "store"]

_LARGEST_ROUNDED: Final = 464.0
"""What lies beyond rounds to more than 448, the largest value of float8_e4m3fn (a tie goes to the even 448)."""

_NAN_BITS: Final = 0x7F


def convert(out: torch.Tensor, values: torch.Tensor) -> None:
    """``out = values`` for two float types or two equal types, of one shape and any strides.

    torch saturates where float8_e4m3fn is too small, even infinities; here that is NaN.
    """
    out.copy_(values)
    if out.dtype is torch.float8_e4m3fn and values.dtype is not torch.float8_e4m3fn and out.numel():
        _mark_overflow(out, values)


def store(out: torch.Tensor, values: torch.Tensor) -> None:
    """``convert``, and for bool: what is not zero is True."""
    if out.dtype is torch.bool:
        torch.ne(values, 0, out=out)
    else:
        convert(out, values)


def as_parts(values: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of a 1-D complex tensor in turn: a 1-D view of twice the numel."""
    return torch.view_as_real(values).view(-1)


def _mark_overflow(out: torch.Tensor, values: torch.Tensor) -> None:
    if values.numel() > BLOCK_NUMEL:
        longest = max(range(values.dim()), key=values.shape.__getitem__)
        half = values.shape[longest] // 2
        for start, length in ((0, half), (half, values.shape[longest] - half)):
            _mark_overflow(out.narrow(longest, start, length), values.narrow(longest, start, length))
        return
    wide = values.float() if values.dtype is torch.float8_e5m2 else values
    lowest, highest = (float(limit) for limit in torch.aminmax(wide))
    if not (-_LARGEST_ROUNDED <= lowest and highest <= _LARGEST_ROUNDED):
        out.view(torch.uint8).masked_fill_(wide.abs() > _LARGEST_ROUNDED, _NAN_BITS)

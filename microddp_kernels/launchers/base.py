"""The contract of a launcher: how blocks of elements are combined and copied on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["Launcher"]


class Launcher(ABC):
    """Combines and copies tensors of one device: done on return on the CPU, enqueued on torch's current stream on CUDA.

    Laws of ``combine``: ``out`` and the operands are 1-D contiguous and have the same numel (0 is allowed and does
    nothing) and device; for an operator of several lanes each of them is a tuple of such tensors, one a lane, and a
    wide lane has a whole multiple of the others' numel, row after row. ``out`` may be exactly the memory of any
    operand, never a shifted overlap. Float types may differ (a float32 accumulator beside 16-bit operands): the fold is
    computed in the accumulation type and rounded once into ``out``.

    Rounding is to nearest, ties to even; what is too large becomes infinite, and NaN in float8_e4m3fn, which has no
    infinity. For the built-in operators all launchers give the same bits, but for the sign and payload of NaN. Safe to
    call from several threads.
    """

    name: str = "abstract"

    @abstractmethod
    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec) -> None:
        """``out = how(operands)``, one or more operands."""

    @abstractmethod
    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """``out = source``, of any strides and one shape; between float types it converts."""

    @abstractmethod
    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Puts contiguous tensors of one element type one after another into the 1-D ``out``, in one launch."""

    @abstractmethod
    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """The inverse of ``pack``: cuts the 1-D ``source`` into contiguous tensors."""

    def rehearse(self, op: ReduceOp, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
        """Runs the operator once on a few elements of these types, one type a lane, so that what cannot run shows.

        Raises:
            TypeError: the operator cannot be run on these types here; the text says why.
        """
        samples = tuple(torch.ones(2, dtype=dtype, device=device) for dtype in dtypes)
        values = samples if op.lanes else samples[0]
        spec = CombineSpec(op, divisor=2 if op.finishes else None)
        try:
            self.combine(values, [values, values], spec)
        except Exception as error:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            text = f"operator {op.name!r} cannot be run on {names} by the {self.name} launcher"
            raise TypeError(f"{text}: {type(error).__name__}: {error}") from error

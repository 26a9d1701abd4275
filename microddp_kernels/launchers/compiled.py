"""Runs the Triton kernels on CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final

import torch

from microddp_kernels.launchers.base import Launcher
from microddp_kernels.launchers.blocks import combine_on_blocks, copy_on_blocks
from microddp_kernels.launchers.checks import check_devices, lanes_of
from microddp_kernels.launchers.packs import Table, make_table, pack_on_blocks
from microddp_kernels.reduce_op import CombineSpec, Values

__all__ = ["CompiledLauncher"]

_BLOCK: Final = 2048
"""16 elements a thread with four warps: whole 128-bit accesses down to one-byte types."""

_OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": False}
"""Contraction into fused multiply-adds would change the bits."""


class CompiledLauncher(Launcher):
    """Enqueues launches on the current stream of the tensors' device.

    It has never run: its kernels were compiled for sm_90 and read as PTX, on machines without a GPU. Results equal the
    other launchers' but for the payload of NaN.
    """

    name = "compiled"

    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec) -> None:
        """Enqueues ``out = how(operands)``.

        Raises:
            TypeError, ValueError: see ``microddp_kernels.launchers.checks``.
        """
        tensors = [lane for each in (out, *operands) for lane in lanes_of(each)]
        check_devices(self.name, "cuda", *tensors)
        device = tensors[0].device
        with torch.cuda.device(device):
            combine_on_blocks(
                _launch, out, operands, how, _BLOCK, soft_bfloat16=False, hardware_float8=_has_float8(device)
            )

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues ``out = source``."""
        check_devices(self.name, "cuda", out, source)
        with torch.cuda.device(out.device):
            copy_on_blocks(_launch, out, source, _BLOCK, hardware_float8=_has_float8(out.device))

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Enqueues ``out`` = the ``sources`` one after another."""
        self._pack(out, sources, unpacks=False)

    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Enqueues the cutting of ``source`` into ``outs``."""
        self._pack(source, outs, unpacks=True)

    def _pack(self, flat: torch.Tensor, parts: Sequence[torch.Tensor], unpacks: bool) -> None:
        check_devices(self.name, "cuda", flat, *parts)
        with torch.cuda.device(flat.device):
            pack_on_blocks(_launch, flat, parts, _BLOCK, unpacks, _table_on_stream)


def _table_on_stream(columns: Table, device: torch.device) -> torch.Tensor:
    return _cached_table(columns, device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=64)
def _cached_table(columns: Table, device: torch.device, stream: int) -> torch.Tensor:
    """The table, allocated on ``stream``, so that its memory is reused after the launches there that read it.

    The same gradients are packed in every iteration: then nothing is copied to the device.
    """
    return make_table(columns, device)


def _launch(kernel: Any, num_programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[(num_programs,)](*arguments, **constants, **_OPTIONS)


@cache
def _has_float8(device: torch.device) -> bool:
    """Whether the device has instructions that convert float8."""
    return torch.cuda.get_device_capability(device) >= (8, 9)

"""The arguments with which the Triton launchers start the kernel that packs and unpacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from microddp_kernels import copy_kernels
from microddp_kernels.launchers.checks import check_pack
from microddp_kernels.launchers.formats import Launch, as_bytes

__all__ = ["Table", "make_table", "pack_on_blocks"]

Table = tuple[tuple[int, ...], ...]
"""The table of ``pack_kernel``: for each tensor its address, its start, its numel, its first program, its alignment."""

_BLOCKS: Final = 4
"""Blocks a program: enough loads in flight, and the search in the table costs little beside them."""


def pack_on_blocks(
    launch: Launch,
    flat: torch.Tensor,
    parts: Sequence[torch.Tensor],
    block: int,
    unpacks: bool,
    make_table: Callable[[Table, torch.device], torch.Tensor],
) -> None:
    """Checks the arguments of a pack or unpack and launches its kernel, unless there is nothing to do.

    Args:
        launch: starts a kernel.
        flat: the packed tensor.
        parts: the others.
        block: elements a block.
        unpacks: from ``flat`` to ``parts``, not the other way.
        make_table: an int64 tensor on a device, holding a table, that lives until the launch has been enqueued.
    """
    check_pack(flat, parts)
    if flat.numel() == 0:
        return
    carrier = as_bytes(flat)
    itemsize, words = carrier.element_size(), carrier.numel() // flat.numel()
    columns, num_programs = _table(parts, flat.data_ptr(), itemsize, words, block * _BLOCKS)
    table = make_table(columns, flat.device)
    num_parts = len(columns[0])
    arguments = (carrier, table, num_parts, (num_parts - 1).bit_length())
    launch(copy_kernels.pack_kernel, num_programs, arguments, {"UNPACKS": unpacks, "BLOCKS": _BLOCKS, "BLOCK": block})


def make_table(columns: Table, device: torch.device) -> torch.Tensor:
    """The table as a tensor, copied there before this returns."""
    return torch.tensor(columns, dtype=torch.int64).to(device)


def _table(
    parts: Sequence[torch.Tensor], flat_address: int, itemsize: int, words: int, chunk: int
) -> tuple[Table, int]:
    """The table, without the tensors that are empty, and how many programs there are, of ``chunk`` elements each.

    An element has ``words`` elements of what is moved, of ``itemsize`` bytes.
    """
    rows: list[tuple[int, ...]] = []
    start = num_programs = 0
    for part in parts:
        numel = part.numel() * words
        if numel:
            is_aligned = not (part.data_ptr() | (flat_address + start * itemsize)) % 16
            rows.append((part.data_ptr(), start, numel, num_programs, int(is_aligned)))
            num_programs += -(-numel // chunk)
            start += numel
    return tuple(zip(*rows)), num_programs

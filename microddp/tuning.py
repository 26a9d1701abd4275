"""Which algorithm, how large a slice and how many slots, by size.

The figures come from ``bench/bench_all_reduce.py`` on host transports; they are choices, not laws, and every one of
them can be overridden by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Slicing", "choose_all_reduce", "choose_device_slicing", "choose_slicing"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Slicing:
    """Bytes of a full slice (a multiple of 16) and the number of slots to alternate between."""

    slice_nbytes: int
    num_slots: int


def choose_all_reduce(nbytes: int, *, order: str | None = None, commutative: bool = True) -> str:
    """The name of the all-reduce to use when the caller names none.

    Small tensors are dominated by the number of messages in a row: ``tree`` has the fewest. Large ones by bytes:
    ``ring`` sends the fewest. Over Gloo on two cores they cross between 1 and 4 MiB, with 2 processes and with 4
    (``python bench/bench_all_reduce.py``). In rank order, or for an operator that does not commute, ``direct`` moves
    the least.
    """
    if order == "rank" or not commutative:
        return "direct"
    return "tree" if nbytes <= MIB else "ring"


def choose_slicing(chunk_nbytes: int) -> Slicing:
    """One slice while a chunk is at most 1 MiB, then slices of at most 1 MiB, as equal as 16 bytes allow.

    Two slots of 1 MiB stay in a core's cache; larger slices lose that, smaller ones cost a message each.
    """
    num_slices = max(1, -(-chunk_nbytes // MIB))
    units = -(-chunk_nbytes // (16 * num_slices))
    return Slicing(max(1, units) * 16, 2)


def choose_device_slicing(chunk_nbytes: int) -> Slicing:
    """One slice while a chunk is at most 1 MiB, 2 up to 8 MiB, then 4, but slices of at most 64 MiB.

    On a GPU a slice costs launches, and must be long enough to hide them; a few are enough to combine one while the
    next travels. Not measured on a GPU yet. The two slots, and no more, are held whatever the size.
    """
    num_slices = 1 if chunk_nbytes <= MIB else 2 if chunk_nbytes <= 8 * MIB else max(4, -(-chunk_nbytes // (64 * MIB)))
    units = -(-chunk_nbytes // (16 * num_slices))
    return Slicing(max(1, units) * 16, 2)

"""Where chunks and slices lie in a tensor.

Standard library only.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALIGNMENT_NBYTES", "aligned_span", "alignment_numel", "equal_span", "slice_spans"]

ALIGNMENT_NBYTES: Final = 16
"""Chunks and slices start at multiples of this, from the tensor's start: the width of a GPU's widest access."""


def alignment_numel(itemsize: int) -> int:
    """How many elements of ``itemsize`` bytes lie between two legal starts."""
    return max(1, ALIGNMENT_NBYTES // itemsize)


def aligned_span(chunk: int, num_chunks: int, numel: int, itemsize: int) -> tuple[int, int]:
    """The [start, stop) of one chunk in elements: starts aligned, sizes as equal as that allows.

    Chunks may be empty (numel below num_chunks); the last one takes the rest.
    """
    unit = alignment_numel(itemsize)
    units = -(-numel // unit)
    start, stop = (min(numel, units * each // num_chunks * unit) for each in (chunk, chunk + 1))
    return start, stop


def equal_span(chunk: int, num_chunks: int, numel: int, itemsize: int) -> tuple[int, int]:
    """The [start, stop) of one of ``num_chunks`` equal chunks, wherever that starts; numel divides evenly.

    For reduce_scatter and all_gather, where a chunk is one rank's tensor and its size is the caller's.
    """
    each = numel // num_chunks
    return chunk * each, (chunk + 1) * each


def slice_spans(start: int, stop: int, slice_numel: int) -> list[tuple[int, int]]:
    """The slices of [start, stop), ``slice_numel`` elements each, the last one shorter; none if it is empty."""
    return [(each, min(each + slice_numel, stop)) for each in range(start, stop, slice_numel)]

"""What the ranks of ``explain`` start with: read from the command line, or numbers that are easy to follow."""

from __future__ import annotations

import re

import torch

from microddp.cli.output import counted
from microddp.cli.usage import UsageError
from microddp.schedule import Schedule
from microddp.schedule.chunks import alignment_numel

__all__ = ["DTYPES", "default_rows", "element_texts", "find_dtype", "parse_rows"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}
_WORDS = {"true": 1, "false": 0}
_MAX_PROBE_RANKS = 7  # 7777777 is still exact in float32


def find_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``.

    Raises:
        UsageError: unknown; lists the known ones.
    """
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_rows(text: str, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One 1-D tensor for each rank from rows like ``1,2,3;4,5,6``.

    Raises:
        UsageError: the wrong number of rows, ragged rows, or what is no number of this dtype.
    """
    rows = [[each for each in re.split(r"[\s,]+", row.strip()) if each] for row in text.strip().strip(";").split(";")]
    if len(rows) != world_size:
        raise UsageError(
            f"--tensor has {counted(len(rows), 'row')} for {counted(world_size, 'rank')}: one for each is needed"
        )
    for rank, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise UsageError(f"--tensor: row {rank} has {counted(len(row), 'number')}, row 0 has {len(rows[0])}")
    if not rows[0]:
        raise UsageError("--tensor: the rows are empty")
    return [_parse_row(rank, row, dtype) for rank, row in enumerate(rows)]


def _parse_row(rank: int, row: list[str], dtype: torch.dtype) -> torch.Tensor:
    read = float if dtype.is_floating_point else int
    values: list[float] = []
    for place, word in enumerate(row):
        try:
            values.append(_WORDS[word.lower()] if word.lower() in _WORDS else read(word))
        except ValueError:
            kind = "a number" if dtype.is_floating_point else "an integer"
            raise UsageError(f"--tensor: row {rank}, column {place}: {word!r} is not {kind}") from None
        _check_range(rank, place, values[-1], dtype)
    return torch.tensor(values, dtype=dtype)


def _check_range(rank: int, place: int, value: float, dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not low <= value <= high:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(f"--tensor: row {rank}, column {place}: {value} is not in {low}..{high}, the range of {name}")


def default_rows(schedule: Schedule, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """What the ranks hold when the user names nothing, and how many equal elements each number stands for.

    Every chunk is 16 bytes, the smallest that starts where chunks may start. Up to seven ranks of 32 or 64 bits hold
    powers of ten, so that the digits of a sum name the ranks that are in it: 1101 holds ranks 0, 2 and 3.
    """
    n, repeats = schedule.world_size, alignment_numel(dtype.itemsize)
    num_chunks = schedule.num_chunks
    is_probe = n <= _MAX_PROBE_RANKS and dtype.itemsize >= 4
    rows = []
    for rank in range(n):
        values = [10**rank * (chunk + 1) if is_probe else rank + 1 for chunk in range(num_chunks)]
        if schedule.collective == "all_gather":
            values = [values[rank]]
        if dtype.itemsize == 1:
            values = [value % (2 if dtype == torch.bool else 127) for value in values]
        rows.append(torch.tensor(values, dtype=dtype).repeat_interleave(repeats))
    return rows, repeats


def element_texts(values: torch.Tensor) -> list[str]:
    """Each element as people write it: 12, 0.5, nan, true."""
    if values.dtype == torch.bool:
        return ["true" if value else "false" for value in values.tolist()]
    return [f"{value:.7g}" if isinstance(value, float) else str(value) for value in values.tolist()]

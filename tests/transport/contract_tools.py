"""What the contract cases share: headers, messages that name their edge, and one collective as a context manager."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from microddp.transport.base import Exchange, Header, Kind, Transfer, Transport

__all__ = [
    "DEADLINE_S",
    "DTYPES",
    "Case",
    "exchange",
    "make_header",
    "message",
    "neighbours",
    "next_sequence",
    "poison",
    "recv",
    "same_bytes",
    "send",
]

Case = Callable[[Transport], None]

DEADLINE_S = 20.0
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

_sequences: WeakKeyDictionary[Transport, Iterator[int]] = WeakKeyDictionary()


def next_sequence(transport: Transport) -> int:
    """Counts the collectives of one transport over all cases that run on it."""
    return next(_sequences.setdefault(transport, itertools.count()))


def make_header(sequence: int, *, dtype: torch.dtype = torch.float32, numel: int = 1) -> Header:
    """A header that is the same on all ranks."""
    return Header(sequence, "all_reduce", "ring", "sum", str(dtype), (numel,), -1, 1 << 20)


@contextmanager
def exchange(transport: Transport, *, deadline_s: float = DEADLINE_S) -> Iterator[Exchange]:
    """One collective: opened with this rank's next sequence number, finished if the body did not raise."""
    opened = transport.open(make_header(next_sequence(transport)), time.monotonic() + deadline_s)
    yield opened
    opened.finish()


def message(source: int, target: int, salt: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``numel`` elements whose bytes depend on the edge and ``salt``; any bit pattern that ``dtype`` allows."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    pattern = torch.arange(numel * itemsize, dtype=torch.int64) * 7 + source * 31 + target * 67 + salt * 101
    if dtype is torch.bool:
        return (pattern // 7 + pattern) % 3 == 0
    return (pattern % 251).to(torch.uint8).view(dtype)


def poison(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A receive buffer whose bytes no ``message`` holds (true everywhere for bool)."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    byte = 1 if dtype is torch.bool else 255
    return torch.full((numel * itemsize,), byte, dtype=torch.uint8).view(dtype)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bitwise equality, NaN and padding patterns included."""
    return actual.dtype == expected.dtype and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def send(peer: int, view: torch.Tensor, step: int = 0) -> Transfer:
    """A send of ``view``."""
    return Transfer(Kind.SEND, peer, step, view)


def recv(peer: int, view: torch.Tensor, step: int = 0) -> Transfer:
    """A receive into ``view``."""
    return Transfer(Kind.RECV, peer, step, view)


def neighbours(transport: Transport) -> tuple[int, int]:
    """The ranks to the left and to the right on the ring."""
    return (transport.rank - 1) % transport.world_size, (transport.rank + 1) % transport.world_size

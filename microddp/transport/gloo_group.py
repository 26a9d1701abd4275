"""The few calls of torch.distributed's Gloo process group that the transport needs, and what is odd about each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ProcessGroupGloo

from microddp.errors import TransportError
from microddp.transport.base import Header

__all__ = [
    "MIN_WAIT_S",
    "NUM_TAGS",
    "clone",
    "close_connections",
    "connect",
    "dissemination",
    "header_tag",
    "is_connected",
]

MIN_WAIT_S: Final = 0.001
"""The shortest wait: Gloo counts milliseconds and takes 0 for "no timeout"."""

NUM_TAGS: Final = 2**31 - 1
"""Tags of messages are 0..NUM_TAGS - 1; Gloo has 31 bits."""

RESERVED_TAG: Final = NUM_TAGS  # no message's tag

_FIELD_NAMES: Final = tuple(field.name for field in fields(Header))


def header_tag(header: Header) -> int:
    """A message tag that is the same on all ranks that agree about the collective."""
    values = tuple(map(header.__getattribute__, _FIELD_NAMES))  # the header's own repr takes twice as long
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % NUM_TAGS


def clone(store: Any) -> Any:
    """The same store over another connection; a store without connections (in memory, in a file) is returned."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def connect(store: Any, rank: int, world_size: int, timeout: float, address: str | None) -> Any:
    """Connects every rank with every other one. No global process group is made or needed.

    Raises:
        TransportError: some rank did not come within ``timeout`` seconds, or there is no such address here.
    """
    group_type: Any = ProcessGroupGloo  # torch's own stubs do not know the options' constructor
    options = group_type._Options()
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1  # for Gloo's own collectives, which are not used
    try:
        options._devices = [_device(address)]
        group = group_type(store, rank, world_size, options)
        _barrier(group, rank, world_size, options._timeout)
        return group
    except RuntimeError as error:
        raise TransportError(
            f"rank {rank} of {world_size} could not connect to the other ranks within {timeout:g} s: {error}"
        ) from error


def dissemination(rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """(whom to tell, whom to hear from) in each round of a barrier: after round k, news of 2^(k+1) ranks is here."""
    for round_number in range((world_size - 1).bit_length()):
        distance = 2**round_number
        yield (rank + distance) % world_size, (rank - distance) % world_size


def close_connections(group: Any, rank: int, world_size: int) -> None:
    """Ends every wait of this rank, from any thread, and, one after the other, those of its peers.

    Gloo offers one way only: a receive that times out closes all connections of its rank. (Its ``abort`` and
    ``shutdown`` leave point-to-point waits alone.)
    """
    scratch = [torch.empty(1, dtype=torch.uint8)]
    for peer in range(world_size):
        if peer == rank:
            continue
        try:
            group.recv(scratch, peer, RESERVED_TAG).wait(timedelta(seconds=MIN_WAIT_S))
        except RuntimeError:
            # Timed out: done, and the rest raise at once. Or this one was closed before: the next may be open.
            continue


def is_connected(group: Any, peer: int) -> bool:
    """False if the connection to ``peer`` has ended. Each question that is answered by True costs some bytes."""
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, RESERVED_TAG)
    except RuntimeError:
        return False
    return True


def _barrier(group: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    """Keeps this rank from leaving, with its connections, while another is still setting up its own."""
    for to_rank, from_rank in dissemination(rank, world_size):
        token, received = torch.zeros(2, dtype=torch.uint8).split(1)
        works = [group.send([token], to_rank, RESERVED_TAG), group.recv([received], from_rank, RESERVED_TAG)]
        for work in works:
            work.wait(timeout)


def _device(address: str | None) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if address is not None:
        return ProcessGroupGloo.create_device(hostname=address)
    if interface:
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return ProcessGroupGloo.create_default_device()

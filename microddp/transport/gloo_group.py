"""The few calls of torch.distributed's Gloo process group that the transport needs, and what is odd about each."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ProcessGroupGloo

from microddp.errors import TransportError
from microddp.transport.base import Header

__all__ = ["MIN_WAIT", "NUM_TAGS", "clone", "close_connections", "connect", "header_tag"]

MIN_WAIT: Final = timedelta(milliseconds=1)
"""The shortest wait: Gloo counts milliseconds and takes 0 for "no timeout"."""

NUM_TAGS: Final = 2**31 - 1
"""Tags of messages are 0..NUM_TAGS - 1; Gloo has 31 bits."""

POISON_TAG: Final = NUM_TAGS  # no message's tag


def header_tag(header: Header) -> int:
    """A message tag that is the same on all ranks that agree about the collective."""
    digest = hashlib.blake2b(repr(header).encode(), digest_size=8).digest()
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
        return group_type(store, rank, world_size, options)
    except RuntimeError as error:
        raise TransportError(
            f"rank {rank} of {world_size} could not connect to the other ranks within {timeout:g} s: {error}"
        ) from error


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
            group.recv(scratch, peer, POISON_TAG).wait(MIN_WAIT)
        except RuntimeError:
            # Timed out: done, and the rest raise at once. Or this one was closed before: the next may be open.
            continue


def _device(address: str | None) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if address is not None:
        return ProcessGroupGloo.create_device(hostname=address)
    if interface:
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return ProcessGroupGloo.create_default_device()

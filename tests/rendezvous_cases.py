"""What the ranks of the tests of rendezvous do: communicators over torch's process groups, in other processes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from microddp.rendezvous import gloo_from_process_group, store_from_process_group
from microddp.transport.base import Header, Kind, Transfer
from microddp.transport.gloo import GlooTransport

LIMIT_S = 60


def gathered(transport: GlooTransport, value: int) -> list[int]:
    """``value`` of every rank, each sent to every other."""
    header = Header(0, "all_gather", "direct", "none", "torch.int64", (1,), -1, 0)
    values = torch.full((transport.world_size,), -1)
    values[transport.rank] = value
    mine = values[transport.rank].clone().reshape(1)
    opened = transport.open(header, time.monotonic() + LIMIT_S)
    transfers = []
    for peer in range(transport.world_size):
        if peer != transport.rank:
            transfers.append(Transfer(Kind.SEND, peer, 0, mine))
            transfers.append(Transfer(Kind.RECV, peer, 0, values[peer : peer + 1]))
    opened.wait(opened.post(transfers))
    opened.finish()
    return [int(each) for each in values]


def communicators(group: Any, value: int) -> list[list[int]]:
    """Two communicators over one group, both open at once, used in the order opposite to that of their making."""
    first = gloo_from_process_group(group, timeout=LIMIT_S)
    second = gloo_from_process_group(group, timeout=LIMIT_S)
    found = [gathered(second, value + 100), gathered(first, value)]
    first.close()
    second.close()
    return found


def process_groups(transport: GlooTransport, init_method: str) -> dict[str, Any]:
    """Groups of three processes; ``transport`` only says which rank this is.

    Returns for each group this process's rank in it and what its communicators compute, or the error.
    """
    rank, limit = transport.rank, timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=3, timeout=limit)
    try:
        unsorted = dist.new_group([2, 0])
        pair = dist.new_group([1, 2])
        if rank != 1:
            communicators(unsorted, rank)  # rank 2 has called more often than rank 1 when they meet in ``pair``
        return {name: _try(group, rank) for name, group in (("all", None), ("unsorted", unsorted), ("pair", pair))}
    finally:
        dist.destroy_process_group()


def _try(group: Any, value: int) -> Any:
    try:
        return store_from_process_group(group)[1], communicators(group, value)
    except ValueError as error:
        return str(error)

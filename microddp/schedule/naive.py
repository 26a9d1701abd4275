"""Naive all-reduce: everything to rank 0, and back.

n = 3, one chunk c0::

    step   rank 0         rank 1     rank 2
    0      c0<-1 fold     c0->0      .
    1      c0<-2 fold     .          c0->0
    2      c0->1          c0<-0      .
    3      c0->2          .          c0<-0

2(n-1) steps; rank 0 sends and receives (n-1)S bytes, every other rank S. The fold is the left fold in rank order.
It is what a parameter server does, and the yardstick for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from microddp.schedule.ir import OWN, Fold, Recv, Send, Step, everyone, only
from microddp.schedule.registry import algorithm

__all__ = ["naive"]


@algorithm("naive", slice_major=True, rank_order=True)
def naive(rank: int, world_size: int) -> Iterator[Step]:
    """Every rank sends to rank 0, which combines in rank order and sends the result back."""
    for peer in range(1, world_size):
        if rank == 0:
            yield Step((Recv(peer, 0, only(peer), key=peer),), folds=(Fold(0, (OWN, peer)),))
        else:
            yield Step((Send(0, 0),) if rank == peer else ())
    for peer in range(1, world_size):
        if rank == 0:
            yield Step((Send(peer, 0),))
        else:
            yield Step((Recv(0, 0, everyone(world_size)),) if rank == peer else ())

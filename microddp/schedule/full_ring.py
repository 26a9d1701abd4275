"""Full ring (also called double ring): whole tensors go round through two alternating buffers.

What travels is always one rank's own tensor, never a sum: each rank forwards what it last received while it adds
that to its own. n = 3, keys k0 k1 k2 name whose tensor it is::

    step   rank 0                           rank 1                           rank 2
    0      keep k0 c0.k0->1 c0<-2 fold      keep k1 c0.k1->2 c0<-0 fold      keep k2 c0.k2->0 c0<-1 fold
    1      c0.k2->1 c0.k1<-2 fold           c0.k0->2 c0.k2<-0 fold           c0.k1->0 c0.k0<-1 fold

n-1 steps; every rank sends and receives (n-1)S bytes, n/2 times the ring's. Added as it arrives, the order differs
from rank to rank, and so do the bits of a float sum: never keep model replicas in step with it. The variant in rank
order holds all n-1 arrivals and folds once, with the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from microddp.schedule.ir import OWN, Fold, Keep, Recv, Send, Step, only
from microddp.schedule.registry import algorithm

__all__ = ["full_ring", "full_ring_in_rank_order"]


@algorithm("full_ring", slice_major=True, same_bits=False)
def full_ring(rank: int, world_size: int) -> Iterator[Step]:
    """Whole tensors forwarded around the ring through two alternating buffers, added as they arrive."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(world_size - 1):
        forwarded, arriving = (rank - step) % world_size, (left - step) % world_size
        yield Step(
            (Send(right, 0, key=forwarded), Recv(left, 0, only(arriving), key=arriving)),
            keeps=(Keep(0, rank),) if step == 0 else (),
            folds=(Fold(0, (OWN, arriving)),),
        )


@algorithm("full_ring", slice_major=True, rank_order=True)
def full_ring_in_rank_order(rank: int, world_size: int) -> Iterator[Step]:
    """Whole tensors forwarded around the ring, all staged, then folded once in rank order."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(world_size - 1):
        forwarded, arriving = (rank - step) % world_size, (left - step) % world_size
        transfers = Send(right, 0, key=OWN if step == 0 else forwarded), Recv(left, 0, only(arriving), key=arriving)
        is_last = step == world_size - 2
        in_order = tuple(OWN if each == rank else each for each in range(world_size)) if is_last else ()
        yield Step(transfers, folds=(Fold(0, in_order),) if is_last else ())

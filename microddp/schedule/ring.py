"""Ring reduce-scatter, ring all-gather, and the all-reduce that is one after the other.

Each rank sends to its right neighbour and receives from its left one. Chunk c starts at rank c+1, collects one
contribution at each hop, is complete at rank c after n-1 steps, and then goes round once more as a copy.
n = 3, chunks c0 c1 c2::

    step   rank 0                rank 1                rank 2
    0      c2->1 c1<-2 fold      c0->2 c2<-0 fold      c1->0 c0<-1 fold
    1      c1->1 c0<-2 fold      c2->2 c1<-0 fold      c0->0 c2<-1 fold
    2      c0->1 c2<-2           c1->2 c0<-0           c2->0 c1<-1
    3      c2->1 c1<-2           c0->2 c2<-0           c1->0 c0<-1

2(n-1) steps; every rank sends and receives 2(n-1)S/n bytes, which is the least that an all-reduce can do
(P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009; in deep
learning since A. Gibiansky, "Bringing HPC Techniques to Deep Learning", Baidu Research, 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from microddp.schedule.ir import OWN, Fold, Ranks, Recv, Send, Step, cyclic, only
from microddp.schedule.registry import algorithm

__all__ = ["all_gather", "reduce_scatter", "ring"]


@algorithm("ring", num_chunks="world_size")
def ring(rank: int, world_size: int) -> Iterator[Step]:
    """Scatter-reduce then all-gather on n chunks around the ring."""
    yield from reduce_scatter(rank, world_size)
    yield from _gather(rank, world_size, lambda chunk: cyclic(chunk + 1, world_size, world_size))


@algorithm("reduce_scatter", collective="reduce_scatter", num_chunks="world_size")
def reduce_scatter(rank: int, world_size: int) -> Iterator[Step]:
    """Sums chunk c around the ring so that rank c holds it complete."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(world_size - 1):
        chunk = (rank - 2 - step) % world_size
        arrival = Recv(left, chunk, cyclic(chunk + 1, step + 1, world_size), key=left)
        yield Step((Send(right, (chunk + 1) % world_size), arrival), folds=(Fold(chunk, (left, OWN)),))


@algorithm("all_gather", collective="all_gather", num_chunks="world_size")
def all_gather(rank: int, world_size: int) -> Iterator[Step]:
    """Sends rank c's chunk c around the ring until every rank holds all."""
    yield from _gather(rank, world_size, only)


def _gather(rank: int, world_size: int, carries: Callable[[int], Ranks]) -> Iterator[Step]:
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(world_size - 1):
        chunk = (rank - 1 - step) % world_size
        yield Step((Send(right, (chunk + 1) % world_size), Recv(left, chunk, carries(chunk))))

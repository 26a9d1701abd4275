"""Direct all-reduce: every rank fetches its chunk from all others at once, folds it, and hands it out.

n = 3, chunks c0 c1 c2::

    step   rank 0                         rank 1                         rank 2
    0      c1->1 c0<-2 c2->2 c0<-1 fold   c2->2 c1<-0 c0->0 c1<-2 fold   c0->0 c2<-1 c1->1 c2<-0 fold
    1      c0->1 c2<-2 c0->2 c1<-1        c1->2 c0<-0 c1->0 c2<-2        c2->0 c1<-1 c2->1 c0<-0

2 steps; every rank sends and receives 2(n-1)S/n bytes, like the ring, in messages to all ranks. One k-way fold in
rank order, rounded once. Fewest steps at the least bytes; needs n-1 staged chunks and a network that likes all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator

from microddp.schedule.ir import OWN, Fold, Recv, Send, Step, everyone, only
from microddp.schedule.registry import algorithm

__all__ = ["direct"]


@algorithm("direct", num_chunks="world_size", rank_order=True)
def direct(rank: int, world_size: int) -> Iterator[Step]:
    """Each rank receives its chunk from all others at once, combines in rank order, then all-gathers."""
    if world_size == 1:
        return
    # At distance d everyone sends d to the right and receives from d to the left: no rank is everybody's target.
    around = [((rank + distance) % world_size, (rank - distance) % world_size) for distance in range(1, world_size)]
    fetch = ((Send(to, to), Recv(source, rank, only(source), key=source)) for to, source in around)
    in_order = tuple(OWN if each == rank else each for each in range(world_size))
    yield Step(tuple(each for pair in fetch for each in pair), folds=(Fold(rank, in_order),))
    hand_out = ((Send(to, rank), Recv(source, source, everyone(world_size))) for to, source in around)
    yield Step(tuple(each for pair in hand_out for each in pair))

"""Binary-tree reduce, broadcast, and the all-reduce that is one after the other.

Ranks are the nodes of a complete binary tree: the children of v are 2v+1 and 2v+2, rank 0 (or ``root``) is its root.
n = 3, one chunk c0::

    step   rank 0                rank 1     rank 2
    0      c0<-1 c0<-2 fold      c0->0      c0->0
    1      c0->1 c0->2           c0<-0      c0<-0

2h steps for a tree of height h = floor(log2 n); a leaf sends and receives S bytes each, the root 2S each, an inner
node at most 3S each (its two children and its parent). Few steps make it the choice for small tensors; the root's
links make it a poor one for large. The binomial variant is in R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from microddp.schedule.ir import OWN, Fold, Ranks, Recv, Send, Step, cyclic, everyone, only
from microddp.schedule.registry import algorithm

__all__ = ["broadcast", "reduce", "subtree", "tree"]


def subtree(node: int, world_size: int, root: int = 0) -> Ranks:
    """The ranks below and at tree node ``node``: one range of nodes for each level, turned so that 0 is ``root``."""
    ranks: Ranks = ()
    first, last = node, node
    while first < world_size:
        ranks += cyclic(root + first, min(last, world_size - 1) - first + 1, world_size)
        first, last = 2 * first + 1, 2 * last + 2
    return ranks


def _depth(node: int) -> int:
    return (node + 1).bit_length() - 1


def _children(node: int, world_size: int) -> list[int]:
    return [child for child in (2 * node + 1, 2 * node + 2) if child < world_size]


@algorithm("reduce", collective="reduce")
def reduce(rank: int, world_size: int, root: int = 0) -> Iterator[Step]:
    """Sums up a binary tree, so that the root holds the result."""
    node = (rank - root) % world_size
    to_rank = [(child + root) % world_size for child in _children(node, world_size)]
    for depth in range(_depth(world_size - 1), 0, -1):
        if _depth(node) == depth:
            yield Step((Send(((node - 1) // 2 + root) % world_size, 0),))
        elif _depth(node) == depth - 1 and to_rank:
            receives = tuple(
                Recv(peer, 0, subtree((peer - root) % world_size, world_size, root), key=peer) for peer in to_rank
            )
            yield Step(receives, folds=(Fold(0, (OWN, *to_rank)),))
        else:
            yield Step()


def _down(rank: int, world_size: int, root: int, carries: Ranks) -> Iterator[Step]:
    node = (rank - root) % world_size
    for depth in range(1, _depth(world_size - 1) + 1):
        if _depth(node) == depth:
            yield Step((Recv(((node - 1) // 2 + root) % world_size, 0, carries),))
        elif _depth(node) == depth - 1:
            peers = [(child + root) % world_size for child in _children(node, world_size)]
            yield Step(tuple(Send(peer, 0) for peer in peers))
        else:
            yield Step()


@algorithm("broadcast", collective="broadcast")
def broadcast(rank: int, world_size: int, root: int = 0) -> Iterator[Step]:
    """Copies the root's tensor down a binary tree."""
    yield from _down(rank, world_size, root, only(root))


@algorithm("tree")
def tree(rank: int, world_size: int) -> Iterator[Step]:
    """Binary tree, reduce up, broadcast down."""
    yield from reduce(rank, world_size)
    yield from _down(rank, world_size, 0, everyone(world_size))

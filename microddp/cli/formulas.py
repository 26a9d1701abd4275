"""The closed formulas of the literature: how many bytes each rank sends and receives, and in how many steps.

They know nothing of schedules or transports, so that what is counted there can be held against them. n ranks, S bytes
in the whole tensor (for all_gather and reduce_scatter: n chunks together).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

__all__ = ["ALIGNMENT_NBYTES", "Share", "Term", "num_steps_formula", "share_of"]

ALIGNMENT_NBYTES = 16
"""Chunks start at multiples of this many bytes; where S is not a multiple of 16n they differ by as much in size."""


@dataclass(frozen=True, slots=True)
class Term:
    """A number of bytes, in words and as a value."""

    text: str
    nbytes: Fraction

    def __str__(self) -> str:
        value = str(self.nbytes) if self.nbytes.denominator == 1 else f"{float(self.nbytes):.2f}"
        return f"{self.text} = {value}" if self.text != value else value


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of the traffic.

    Attributes:
        role: what the rank is in this algorithm: "root", "inner", "leaf", "others" or "every rank".
        sent, received, both: bytes.
        tolerance_nbytes: how far each of sent and received may be off: 0, or 16 bytes for each chunk that is moved.
    """

    role: str
    sent: Term
    received: Term
    both: Term
    tolerance_nbytes: int

    def agrees(self, sent: int, received: int) -> bool:
        """Whether counted bytes fit."""
        off = (abs(sent - self.sent.nbytes), abs(received - self.received.nbytes))
        return max(off) <= self.tolerance_nbytes


def share_of(algorithm: str, rank: int, world_size: int, nbytes: int, root: int = 0) -> Share | None:
    """The part of ``rank`` in ``algorithm``; None if no formula is known."""
    n, size = world_size, Fraction(nbytes)
    if algorithm in ("ring", "direct"):
        is_even = nbytes % (ALIGNMENT_NBYTES * n) == 0
        tolerance = 0 if is_even else ALIGNMENT_NBYTES * 2 * (n - 1)
        return _equal("every rank", "2(n-1)S/n", "4(n-1)S/n", 2 * (n - 1) * size / n, tolerance)
    if algorithm in ("reduce_scatter", "all_gather"):
        return _equal("every rank", "(n-1)S/n", "2(n-1)S/n", (n - 1) * size / n)
    if algorithm == "full_ring":
        return _equal("every rank", "(n-1)S", "2(n-1)S", (n - 1) * size)
    if algorithm == "naive":
        if rank == 0:
            return _equal("root", "(n-1)S", "2(n-1)S", (n - 1) * size)
        return _equal("others", "S", "2S", size)
    if algorithm in ("tree", "broadcast", "reduce"):
        return _tree_share(algorithm, (rank - root) % n, n, size)
    return None


def num_steps_formula(algorithm: str, world_size: int) -> Term | None:
    """How many steps ``algorithm`` takes; None if no formula is known."""
    n, height = world_size, world_size.bit_length() - 1
    known = {
        "naive": ("2(n-1)", 2 * (n - 1)),
        "tree": ("2 floor(log2 n)", 2 * height),
        "broadcast": ("floor(log2 n)", height),
        "reduce": ("floor(log2 n)", height),
        "ring": ("2(n-1)", 2 * (n - 1)),
        "full_ring": ("n-1", n - 1),
        "direct": ("2", 2 if n > 1 else 0),
        "reduce_scatter": ("n-1", n - 1),
        "all_gather": ("n-1", n - 1),
    }.get(algorithm)
    return None if known is None else Term(known[0], Fraction(known[1]))


def _equal(role: str, text: str, both_text: str, nbytes: Fraction, tolerance: int = 0) -> Share:
    return Share(role, Term(text, nbytes), Term(text, nbytes), Term(both_text, 2 * nbytes), tolerance)


def _tree_share(algorithm: str, node: int, world_size: int, size: Fraction) -> Share:
    """In a binary tree where the children of v are 2v+1 and 2v+2, every edge carries S up, S down, or both."""
    children = sum(child < world_size for child in (2 * node + 1, 2 * node + 2))
    parents = int(node > 0)
    role = "root" if not parents else "inner" if children else "leaf"
    up, down = algorithm in ("tree", "reduce"), algorithm in ("tree", "broadcast")
    sent = up * parents + down * children
    received = up * children + down * parents
    return Share(role, _times(sent, size), _times(received, size), _times(sent + received, size), 0)


def _times(factor: int, size: Fraction) -> Term:
    text = {0: "0", 1: "S"}.get(factor, f"{factor}S")
    return Term(text, factor * size)

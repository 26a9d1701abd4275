"""Symbolic values: which contributions a value holds, and in which order they were combined.

Terms are interned, so that equal terms have equal numbers. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Overlap", "Terms"]

_MAX_TEXT = 400


class Overlap(Exception):
    """A fold would count a contribution twice; ``ranks`` says whose."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class Terms:
    """A table of interned terms. A term is an int; leaves are the ranks' own contributions."""

    def __init__(self) -> None:
        self._numbers: dict[int | tuple[int, ...], int] = {}
        self._parts: list[int | tuple[int, ...]] = []
        self._masks: list[int] = []

    def leaf(self, rank: int) -> int:
        """The contribution of one rank."""
        return self._intern(rank, 1 << rank)

    def fold(self, operands: Sequence[int]) -> int:
        """One left fold of two or more terms, rounded once.

        Raises:
            Overlap: two operands hold the same rank's contribution.
        """
        mask = 0
        for each in operands:
            both = mask & self._masks[each]
            if both:
                raise Overlap(ranks_of(both))
            mask |= self._masks[each]
        return self._intern(tuple(operands), mask)

    def operands(self, term: int) -> tuple[int, ...]:
        """What the term's last fold combined; a leaf is its own only operand."""
        part = self._parts[term]
        return part if isinstance(part, tuple) else (term,)

    def mask(self, term: int) -> int:
        """The contributions held, as a bit for each rank."""
        return self._masks[term]

    def is_rank_order(self, term: int, world_size: int) -> bool:
        """Whether the term is ((x0∘x1)∘x2)∘… over all ranks, however its folds are cut."""
        later: list[int] = []
        part = self._parts[term]
        while isinstance(part, tuple):
            later.extend(reversed(part[1:]))
            part = self._parts[part[0]]
        leaves = [self._parts[each] for each in reversed(later)]
        return [part, *leaves] == list(range(world_size))

    def rebuild(self, term: int, other: Terms) -> int:
        """The same term in another table."""
        new: dict[int, int] = {}
        stack = [term]
        while stack:
            top = stack[-1]
            part = self._parts[top]
            missing = [each for each in part if each not in new] if isinstance(part, tuple) else []
            if missing:
                stack.extend(missing)
                continue
            new[top] = other.fold([new[each] for each in part]) if isinstance(part, tuple) else other.leaf(part)
            stack.pop()
        return new[term]

    def text(self, term: int) -> str:
        """The term as people write it: ``((x1∘x2)∘x0)``; cut off where it grows too long."""
        out: list[str] = []
        stack: list[int | str] = [term]
        while stack and len(out) < _MAX_TEXT:
            top = stack.pop()
            part = top if isinstance(top, str) else self._parts[top]
            if isinstance(part, tuple):
                stack.append(")")
                for each in reversed(part[1:]):
                    stack.extend((each, "∘"))
                stack.extend((part[0], "("))
            else:
                out.append(part if isinstance(part, str) else f"x{part}")
        return "".join(out) + ("…" if stack else "")

    def _intern(self, part: int | tuple[int, ...], mask: int) -> int:
        number = self._numbers.setdefault(part, len(self._parts))
        if number == len(self._parts):
            self._parts.append(part)
            self._masks.append(mask)
        return number


def ranks_of(mask: int) -> list[int]:
    """The ranks whose bits are set."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]

"""How long staged values and partial folds live in one rank's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from microddp.schedule import OWN, Recv, Send, Step

__all__ = ["Liveness"]

Key = tuple[int, int]  # (chunk, key)


@dataclass(frozen=True, slots=True)
class _OwnUse:
    """One use of the rank's own copy of a chunk: by a transfer or keep, or by a fold that writes it."""

    is_fold: bool = False
    reads_own: bool = True


class Liveness:
    """Facts about one rank's steps.

    Attributes:
        last_use: (chunk, key) -> the last step that reads it.
        num_uses: (chunk, key) -> how often it is read.
        peak: the most values staged at once.
        crosses_steps: a staged value is used in a later step than the one that staged it.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.last_use: dict[Key, int] = {}
        self.num_uses: Counter[Key] = Counter()
        self._own_uses: dict[int, list[_OwnUse]] = {}
        self._place_of_fold: dict[tuple[int, int], tuple[list[_OwnUse], int]] = {}
        born: dict[Key, int] = {}
        for number, step in enumerate(steps):
            self._scan(number, step, born)
        self.crosses_steps = any(self.last_use[key] > start for key, start in born.items())
        change: Counter[int] = Counter()
        for key, start in born.items():
            change[start] += 1
            change[self.last_use[key] + 1] -= 1
        self.peak = level = 0
        for number in sorted(change):
            level += change[number]
            self.peak = max(self.peak, level)

    def chain(self, step: int, fold: int) -> tuple[bool, bool]:
        """Whether a fold continues the chunk's previous fold, and whether the next one continues it.

        It does if nothing else reads or replaces the rank's own copy in between.
        """
        uses, place = self._place_of_fold[step, fold]
        continues = place > 0 and uses[place].reads_own and uses[place - 1].is_fold
        continued = place + 1 < len(uses) and uses[place + 1].is_fold and uses[place + 1].reads_own
        return continues, continued

    def _scan(self, number: int, step: Step, born: dict[Key, int]) -> None:
        for keep in step.keeps:
            born[keep.chunk, keep.key] = self.last_use[keep.chunk, keep.key] = number
            self._use_own(keep.chunk, _OwnUse())
        for each in step.transfers:
            if each.key == OWN:
                self._use_own(each.chunk, _OwnUse())
            elif isinstance(each, Recv):
                born[each.chunk, each.key] = self.last_use[each.chunk, each.key] = number
            elif isinstance(each, Send):
                self._use(each.chunk, each.key, number)
        for place, fold in enumerate(step.folds):
            for key in fold.operands:
                if key != OWN:
                    self._use(fold.chunk, key, number)
            uses = self._use_own(fold.chunk, _OwnUse(is_fold=True, reads_own=OWN in fold.operands))
            self._place_of_fold[number, place] = uses, len(uses) - 1

    def _use(self, chunk: int, key: int, number: int) -> None:
        self.last_use[chunk, key] = number
        self.num_uses[chunk, key] += 1

    def _use_own(self, chunk: int, use: _OwnUse) -> list[_OwnUse]:
        uses = self._own_uses.setdefault(chunk, [])
        uses.append(use)
        return uses

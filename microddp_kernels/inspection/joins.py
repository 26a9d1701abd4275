"""Where the two ways of a branch come together again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from microddp_kernels.inspection.ptx import Kernel

__all__ = ["JUMPS", "join_after"]

JUMPS = frozenset({"bra", "exit", "ret"})
"""The instructions after which another than the next one may follow."""


def join_after(kernel: Kernel, branch: int) -> int | None:
    """The first statement that is executed whichever way a branch goes, or None if that is the end of the program.

    It is the branch's immediate post-dominator: the nearest statement on all ways from the branch to the end.
    """
    blocks, following = _blocks(kernel)
    behind = _post_dominators(kernel)
    start = max(each for each in blocks if each <= branch)
    common = behind[start] - {start}
    nearest = [each for each in common if common <= behind[each] | {each}]
    return nearest[0] if nearest and nearest[0] in following else None


@lru_cache(maxsize=4)
def _blocks(kernel: Kernel) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """The first statements of the basic blocks, and which blocks can follow each."""
    end = len(kernel.statements)
    jumps = [index for index, each in enumerate(kernel.statements) if each.opcode.partition(".")[0] in JUMPS]
    starts = sorted(({0, *kernel.labels.values(), *(index + 1 for index in jumps)}) - {end})
    last = dict(zip(starts, [*(each - 1 for each in starts[1:]), end - 1]))
    return tuple(starts), {start: tuple(_following(kernel, last[start])) for start in starts}


def _following(kernel: Kernel, index: int) -> Iterator[int]:
    """What can follow a statement; the number of statements stands for the end."""
    statement, end = kernel.statements[index], len(kernel.statements)
    name = statement.opcode.partition(".")[0]
    if name == "bra":
        yield kernel.labels[statement.operands[0]]
    elif name in JUMPS:
        yield end
    if name not in JUMPS or statement.guard is not None:
        yield index + 1


@lru_cache(maxsize=4)
def _post_dominators(kernel: Kernel) -> dict[int, frozenset[int]]:
    """For each block: itself, the blocks on all ways from it to the end, and the end."""
    starts, following = _blocks(kernel)
    end = len(kernel.statements)
    everything = frozenset({*starts, end})
    found = {**dict.fromkeys(starts, everything), end: frozenset({end})}
    changed = True
    while changed:
        changed = False
        for start in reversed(starts):
            ways = [found[each] for each in following[start]]
            new = frozenset({start}) | frozenset.intersection(*ways)
            changed |= new != found[start]
            found[start] = new
    return found

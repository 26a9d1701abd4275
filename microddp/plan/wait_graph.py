"""What waits for what, as a graph; finds the shortest cycle."""

from __future__ import annotations

from collections import deque

__all__ = ["WaitGraph"]


class WaitGraph:
    """Nodes are numbers; a node may have a name (whatever has a ``str``), which several nodes may share."""

    def __init__(self) -> None:
        self._names: list[object] = []
        self._needs: list[list[int]] = []

    def node(self, name: object = None, *needed: int | None) -> int:
        """A new node that waits for ``needed``; None stands for nothing."""
        self._names.append(name)
        self._needs.append([each for each in needed if each is not None])
        return len(self._names) - 1

    def wait(self, node: int, needed: int) -> None:
        """Makes ``node`` wait for ``needed``."""
        self._needs[node].append(needed)

    def shortest_cycle(self) -> list[str]:
        """The names along a shortest cycle, each waiting for the next, the last for the first; empty if there is none.

        Nodes without a name are passed over, neighbours of one name are named once.
        """
        best: list[int] = []
        stuck = self._stuck()
        for node in sorted(stuck):
            best = self._cycle_through(node, stuck, len(best)) or best
        names = [str(self._names[each]) for each in best if self._names[each] is not None]
        return [name for place, name in enumerate(names) if place == 0 or name != names[place - 1]]

    def _stuck(self) -> set[int]:
        """The nodes that never run: those of cycles, and those that wait for them."""
        unmet = [len(each) for each in self._needs]
        followers: list[list[int]] = [[] for _ in self._needs]
        for node, needed in enumerate(self._needs):
            for each in needed:
                followers[each].append(node)
        ready = [node for node, count in enumerate(unmet) if not count]
        for node in ready:
            for each in followers[node]:
                unmet[each] -= 1
                if not unmet[each]:
                    ready.append(each)
        return {node for node, count in enumerate(unmet) if count}

    def _cycle_through(self, node: int, stuck: set[int], limit: int) -> list[int]:
        """A shortest cycle through a node, if there is one of fewer than ``limit`` nodes; 0 is no limit."""
        came_from: dict[int, int] = {}
        queue = deque([(node, 1)])
        while queue:
            here, length = queue.popleft()
            if limit and length >= limit:
                break
            for each in self._needs[here]:
                if each == node:
                    cycle = [here]
                    while cycle[-1] != node:
                        cycle.append(came_from[cycle[-1]])
                    return cycle[::-1]
                if each in stuck and each not in came_from:
                    came_from[each] = here
                    queue.append((each, length + 1))
        return []

"""Worker processes connected by Gloo, shared by many tests: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from microddp.processes import RankProcesses

__all__ = ["QUICK_NAMES", "GlooPool", "gloo_pools", "shared_pool"]

CALL_TIMEOUT_S = 100.0

# torch asks for the name of every address that its store connects to: a name server that is slow to answer, or not
# there, must not cost five seconds each time.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


class GlooPool:
    """``world_size`` worker processes that call functions; after a failed call new ones take their place."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: RankProcesses | None = None

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank; empty before the first call."""
        return [] if self._ranks is None else self._ranks.pids

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
        """``fn(transport, *args)`` on every rank; ``fn`` is importable. Raises what the first rank raised."""
        if self._ranks is None:
            self._ranks = RankProcesses(self.world_size, env=QUICK_NAMES, daemon=True)
        try:
            return self._ranks.call(fn, *args, timeout=timeout)
        finally:
            if self._ranks.broken:
                self._ranks = None

    def close(self) -> None:
        """Ends the workers."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None


_pools: dict[int, GlooPool] = {}


def shared_pool(world_size: int) -> GlooPool:
    """The run's pool of that size."""
    return _pools.setdefault(world_size, GlooPool(world_size))


@pytest.fixture(scope="session")
def gloo_pools() -> Iterator[Callable[[int], GlooPool]]:
    """``gloo_pools(world_size)`` is the run's pool of that size. Import it into the test module that uses it."""
    yield shared_pool
    for pool in _pools.values():
        pool.close()

"""The algorithms by name, and how a user adds one.

Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

from microddp.schedule.ir import Step

__all__ = [
    "Algorithm",
    "Collective",
    "algorithm",
    "algorithm_names",
    "find_algorithm",
    "registry_generation",
    "unregister",
]

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]

NumChunks = int | Literal["world_size"]


class StepsFunction(Protocol):
    """Yields the steps of one rank; rooted collectives take ``root`` too."""

    def __call__(self, rank: int, world_size: int, /) -> Iterator[Step]: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to do a collective.

    Attributes:
        name: what callers ask for.
        steps: ``steps(rank, world_size)``, with ``root=`` for broadcast and reduce; yields one ``Step`` after another.
            Both ends of a transfer stand in the same step: a rank with nothing to do in one yields an empty ``Step``.
        collective: what it achieves; its schedules are proved against that.
        num_chunks: into how many chunks it cuts the tensor, or "world_size".
        slice_major: the whole schedule runs for one slice before the next begins. Needed where a staged value, or a
            partial fold, lives longer than one step: the staging then holds one slice of it, not all of it.
        rank_order: it folds contributions from the left in rank order, ((x0∘x1)∘x2)∘…; proved like the rest.
        same_bits: it leaves the same bits on every rank; proved like the rest.
    """

    name: str
    steps: Callable[..., Iterator[Step]]
    collective: Collective = "all_reduce"
    num_chunks: NumChunks = 1
    slice_major: bool = False
    rank_order: bool = False
    same_bits: bool = True

    @property
    def rooted(self) -> bool:
        """Whether its steps depend on a root rank."""
        return self.collective in ("broadcast", "reduce")


_variants: dict[str, list[Algorithm]] = {}
_lock = threading.Lock()
_generation = 0

Steps = TypeVar("Steps", bound=Callable[..., Iterator[Step]])


def algorithm(
    name: str,
    *,
    collective: Collective = "all_reduce",
    num_chunks: NumChunks = 1,
    slice_major: bool = False,
    rank_order: bool = False,
    same_bits: bool = True,
) -> Callable[[Steps], Steps]:
    """Registers a function of (rank, world_size) that yields ``Step`` as the algorithm ``name``.

    A name may have a second variant that differs in ``rank_order``; ``order="rank"`` picks it. The other arguments
    are those of ``Algorithm``. Returns the function unchanged.

    Raises:
        ValueError: the name is taken (for that rank_order), the collective is unknown, or num_chunks is not positive.
    """
    if num_chunks != "world_size" and (not isinstance(num_chunks, int) or num_chunks < 1):
        raise ValueError(f"num_chunks must be a positive int or 'world_size', not {num_chunks!r}")
    if collective not in get_args(Collective):
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(get_args(Collective))}")

    def register(steps: Steps) -> Steps:
        entry = Algorithm(name, steps, collective, num_chunks, slice_major, rank_order, same_bits)
        with _lock:
            variants = _variants.setdefault(name, [])
            if any(each.rank_order == rank_order or each.collective != collective for each in variants):
                raise ValueError(f"algorithm {name!r} is registered already; unregister({name!r}) frees the name")
            variants.append(entry)
            _renew()
        return steps

    return register


def unregister(name: str) -> None:
    """Forgets an algorithm and its variants, as a notebook cell that is run again needs.

    Raises:
        ValueError: no algorithm has that name.
    """
    with _lock:
        if _variants.pop(name, None) is None:
            raise ValueError(f"no algorithm {name!r} to unregister")
        _renew()


def registry_generation() -> int:
    """Goes up whenever a name comes to mean something else; who keeps what a name meant compares it."""
    return _generation


def _renew() -> None:
    global _generation
    _generation += 1


def algorithm_names(collective: Collective | None = None) -> tuple[str, ...]:
    """The names of all algorithms, or of those for one collective, in order of registration."""
    with _lock:
        return tuple(name for name, (first, *_) in _variants.items() if collective in (None, first.collective))


def find_algorithm(name: str, *, collective: Collective | None = None, order: str | None = None) -> Algorithm:
    """The algorithm ``name``; with ``order="rank"``, its variant that combines in rank order.

    Raises:
        ValueError: unknown name (the text lists the known ones), unknown order, or no variant in rank order.
    """
    if order not in (None, "rank"):
        raise ValueError(f"unknown order {order!r}; it is None or 'rank'")
    with _lock:
        variants = tuple(_variants.get(name, ())) if isinstance(name, str) else ()
    if not variants or collective not in (None, variants[0].collective):
        known = ", ".join(algorithm_names(collective))
        raise ValueError(f"unknown algorithm {name!r}{f' for {collective}' if collective else ''}; known: {known}")
    if order is None:
        return variants[0]
    for each in variants:
        if each.rank_order:
            return each
    raise ValueError(f"algorithm {name!r} does not combine in rank order; these do: {', '.join(_in_rank_order())}")


def _in_rank_order() -> list[str]:
    with _lock:
        return [
            name
            for name, variants in _variants.items()
            if any(each.rank_order and each.collective == "all_reduce" for each in variants)
        ]

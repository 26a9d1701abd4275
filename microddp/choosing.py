"""Which algorithm does a call: the one asked for, if it keeps the operator's laws, or one chosen by size."""

from __future__ import annotations

from microddp.schedule import Algorithm, algorithm_names, find_algorithm
from microddp.schedule.registry import Collective
from microddp.tuning import choose_all_reduce
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["choose"]


def choose(collective: Collective, name: str | None, order: str | None, op: ReduceOp | None, nbytes: int) -> Algorithm:
    """The algorithm for a tensor of ``nbytes`` bytes as they travel.

    Raises:
        ValueError: unknown name or order, or an algorithm that does not keep the operator's laws; names the legal ones.
    """
    if collective != "all_reduce":
        entry = find_algorithm(collective, collective=collective)
    else:
        in_order = op is not None and not (op.commutative and op.associative)
        if name is None:
            name = choose_all_reduce(nbytes, order=order, commutative=not in_order)
        entry = find_algorithm(name, collective="all_reduce", order=order)
    if op is not None:
        _check_laws(op, entry)
    return entry


def _check_laws(op: ReduceOp, entry: Algorithm) -> None:
    """An operator that does not commute, or is not associative, has a meaning only as a left fold in rank order."""
    if entry.rank_order or (op.commutative and op.associative):
        return
    law = "commutative" if not op.commutative else "associative"
    names = [name for name in algorithm_names("all_reduce") if find_algorithm(name).rank_order]
    ordered = [name for name in algorithm_names("all_reduce") if name not in names and _has_rank_order(name)]
    legal = ", ".join([*names, *(f"{name} with order='rank'" for name in ordered)])
    raise ValueError(
        f"operator {op.name!r} is not {law}, and {entry.name} does not combine in rank order; all_reduce by: {legal}"
    )


def _has_rank_order(name: str) -> bool:
    try:
        return find_algorithm(name, order="rank").rank_order
    except ValueError:
        return False

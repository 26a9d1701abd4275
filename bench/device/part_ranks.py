"""Two, three and four ranks on one GPU, as processes that take each other for other hosts, over sockets."""

from __future__ import annotations

from typing import Final

from bench.device.records import Context, Outcome
from bench.device.team import NEEDED_BY_MULTI_RANK, WAYS, World, adopt, remember_way

__all__ = ["prepare", "run"]

_JOB: Final = "bench.device.job_ranks:run"
_SIZES: Final = (2, 3, 4)
_STAND_IN_SIZES: Final = (2,)


def prepare(context: Context) -> World:
    """Starts the smallest world."""
    return World(context, "ranks", _JOB, 2)


def run(context: Context) -> None:
    """Every size, as long as there is time; the next world imports while one works."""
    world: World = context.prepared
    sizes: tuple[int, ...] = _STAND_IN_SIZES if context.stand_in else _SIZES
    way, texts = WAYS[0], []
    for number, size in enumerate(sizes):
        context.step(f"{size} ranks, {way}")
        following = World(context, "ranks", _JOB, sizes[number + 1], way) if number + 1 < len(sizes) else None
        try:
            with world:
                outcomes = world.run(context.left() / (len(sizes) - number))
            if not number and not _are_connected(outcomes):
                outcomes, way = _second_way(context, outcomes)
                if following is not None and way == WAYS[1]:
                    following.close()
                    following = World(context, "ranks", _JOB, sizes[1], way)
            adopt(context, f"n={size}", outcomes)
            texts.append(f"n={size}: {_counted(outcomes)}")
            if not _are_connected(outcomes):
                break
        finally:
            if following is not None:
                world, following = following, None
    world.close()
    over = f"{_transport(outcomes)} on the CPU" if context.stand_in else f"nccl, {way}"
    context.summary(f"{over}: {'; '.join(texts)}")


def _are_connected(outcomes: list[Outcome]) -> bool:
    return all(any(each["name"] == "connected" for each in outcome.of("note")) for outcome in outcomes)


def _transport(outcomes: list[Outcome]) -> str:
    notes = (each["value"] for each in outcomes[0].of("note") if each["name"] == "connected")
    name = next((each["transport"] for each in notes), "nothing")
    return "NCCL's stand-in" if name == "nccl" else str(name)


def _second_way(context: Context, first: list[Outcome]) -> tuple[list[Outcome], str]:
    """Two ranks, where NCCL can be told to share a GPU; what the first way gave, where it cannot."""
    remember_way(context, None)
    if context.stand_in:
        return first, WAYS[0]
    from cupy.cuda import nccl

    if nccl.get_version() < NEEDED_BY_MULTI_RANK:
        return first, WAYS[0]
    context.note("first way", [outcome.detail for outcome in first])
    with World(context, "ranks", _JOB, 2, WAYS[1]) as world:
        outcomes = world.run(context.left() / 2)
    if not _are_connected(outcomes):
        return first, WAYS[0]
    remember_way(context, WAYS[1])
    return outcomes, WAYS[1]


def _counted(outcomes: list[Outcome]) -> str:
    checks = outcomes[0].of("check")
    worst = next((each.status for each in outcomes if each.status != "ok"), "ok")
    return f"{sum(each['ok'] for each in checks)} of {len(checks)} cells right on rank 0, {worst}"

"""Times several things that a device does, alternating, by its own events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

__all__ = ["medians_us"]

_HEAD_START_CYCLES: Final = 4_000_000
"""About 2 ms in which the device waits, so that the host has enqueued a round before it is timed."""

Run = Callable[[int], object]
"""Called with the number of the round, so that it can change its buffers from one to the next."""


def medians_us(runs: Mapping[str, Run], rounds: int, deadline: float, device: torch.device) -> dict[str, float]:
    """The median time of each, in microseconds; the first round warms up and is not counted.

    Args:
        runs: what to time, by name; each round does each once.
        rounds: as many as there is time for, at least two.
        deadline: in ``time.monotonic()`` seconds.
        device: on the CPU wall-clock time is taken, which is for trying the code only.
    """
    play = _round_on_device if device.type == "cuda" else _round_on_host
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        found = play(runs, number)
        if number:
            for name, value in found.items():
                times[name].append(value)
        if number >= 2 and time.monotonic() > deadline:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def _round_on_device(runs: Mapping[str, Run], number: int) -> dict[str, float]:
    events: dict[str, tuple[Any, Any]] = {}
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for name, run in runs.items():
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(number)
        stop.record()
        events[name] = start, stop
    torch.cuda.synchronize()
    return {name: start.elapsed_time(stop) * 1e3 for name, (start, stop) in events.items()}


def _round_on_host(runs: Mapping[str, Run], number: int) -> dict[str, float]:
    found = {}
    for name, run in runs.items():
        started = time.perf_counter()
        run(number)
        found[name] = (time.perf_counter() - started) * 1e6
    return found

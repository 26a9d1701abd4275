"""The engine's own time for an instruction: real 64-element combines on a transport that moves nothing.

``python bench/bench_engine.py`` prints the time of one instruction (a send, a receive or a combine) with cached views
and with views made anew, and the time of a bare torch call, in the same run, alternating, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from microddp.engine import Engine
from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.plan.instructions import Combine
from microddp.schedule import schedule
from microddp.staging import StagingPool
from microddp.transport.base import Exchange, Header, Transfer, Transport
from microddp_kernels.launchers import launcher_for
from microddp_kernels.operators import get_op

WORLD_SIZE = 32
ELEMENTS_A_CHUNK = 64
REPEATS = 60
FAR = float("inf")


class _NullExchange(Exchange):
    """Every transfer is complete as it is posted; no byte moves."""

    def post(self, group: Sequence[Transfer], after: Sequence[Any] = ()) -> Sequence[Any]:
        return group

    def wait(self, events: Sequence[Any]) -> None:
        return None

    def finish(self) -> None:
        return None


class _NullTransport(Transport):
    """Peers that are always there and never say anything."""

    name = "null"

    def open(self, header: Header, deadline: float) -> Exchange:
        return _NullExchange()

    def reject(self, sequence: int, error: BaseException) -> None:
        return None

    def abort(self, error: BaseException) -> None:
        return None

    def close(self) -> None:
        return None


def _repeat(times: int, call: Callable[[], object]) -> None:
    for _ in range(times):
        call()


def _time_us(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


def measure(plan: Plan) -> dict[str, float]:
    """Microseconds for an instruction of ``plan``: with cached views, with views made, and the bare combine."""
    op = get_op("sum")
    engine = Engine(_NullTransport(0, WORLD_SIZE), launcher_for(torch.device("cpu")), StagingPool())
    data = torch.ones(plan.numel)
    header = Header(0, "all_reduce", "ring", "sum", "float32", (plan.numel,), 0, plan.slice_numel * 4)
    left, right, out = (torch.ones(ELEMENTS_A_CHUNK) for _ in range(3))
    num = len(plan.instructions)
    runs: dict[str, Callable[[], object]] = {
        "cached views": lambda: engine.run(plan, data, op, header, FAR, owner=data),
        "views made": lambda: engine.run(plan, data, op, header, FAR),
        "bare torch.add": lambda: _repeat(num, lambda: torch.add(left, right, out=out)),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 5):
        for name, run in runs.items():
            elapsed = _time_us(run) / num
            if repeat >= 5:
                times[name].append(elapsed)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Prints a line for each plan."""
    torch.set_num_threads(1)
    numel = ELEMENTS_A_CHUNK * WORLD_SIZE
    for name in ("ring", "reduce_scatter"):
        plan = hoist(lower(schedule(name, WORLD_SIZE), 0, numel, 4, LoweringConfig(ELEMENTS_A_CHUNK * 4)))
        combines = sum(1 for each in plan.instructions if isinstance(each, Combine))
        print(f"{name}, {WORLD_SIZE} ranks: {len(plan.instructions)} instructions, {combines} combines of 64 float32")
        for kind, microseconds in measure(plan).items():
            print(f"  {kind:16} {microseconds:6.2f} us an instruction")


if __name__ == "__main__":
    main()

"""What the engine's tests run it on: plans by name."""

from __future__ import annotations

import time
from typing import Any

import torch

from microddp.engine import Engine
from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.schedule import schedule
from microddp.staging import StagingPool
from microddp.transport.base import Header, Transport
from microddp_kernels.launchers import launcher_for
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import Values

CPU = torch.device("cpu")
PATIENCE_S = 20.0


def make_plan(name: str, rank: int, world_size: int, numel: int, *, order: str | None = None, **config: Any) -> Plan:
    """A plan for float32, hoisted unless ``is_hoisted=False``."""
    is_hoisted = config.pop("is_hoisted", True)
    config.setdefault("slice_nbytes", 64)
    plan = lower(schedule(name, world_size, order=order), rank, numel, 4, LoweringConfig(**config))
    return hoist(plan) if is_hoisted else plan


def run_sum(engine: Engine, plan: Plan, data: Values, sequence: int = 0, *, op: str = "sum", **options: Any) -> None:
    """One sum (or other ``op``) through ``engine``, on poisoned staging."""
    engine.pool.poison()
    header = Header(sequence, "all_reduce", "any", "sum", "float32", (plan.numel,), 0, 64)
    engine.run(plan, data, get_op(op), header, time.monotonic() + PATIENCE_S, **options)


def make_engine(transport: Transport, launcher: Launcher | None = None) -> Engine:
    return Engine(transport, launcher or launcher_for(CPU), StagingPool())

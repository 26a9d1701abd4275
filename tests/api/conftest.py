"""Every test here runs on poisoned staging memory, so that a stale read gives NaN or nonsense, never luck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microddp.engine import Engine
from microddp.staging import StagingPool


@pytest.fixture(autouse=True)
def poisoned_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    grown, run = StagingPool._grown, Engine.run

    def grow(pool: StagingPool, nbytes: int, device: torch.device) -> torch.Tensor:
        block = grown(pool, nbytes, device)
        pool.poison()
        return block

    def play(engine: Engine, *args: Any, **options: Any) -> None:
        engine.pool.poison()
        run(engine, *args, **options)

    monkeypatch.setattr(StagingPool, "_grown", grow)
    monkeypatch.setattr(Engine, "run", play)


@pytest.fixture(autouse=True)
def no_rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

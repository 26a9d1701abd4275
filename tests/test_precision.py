"""How far bfloat16 sums of 8 ranks are from the exact ones: rounded at each hop, sent as float32, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from microddp import Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks

pytestmark = pytest.mark.timeout(60)

WORLD_SIZE = 8
NUMEL = 20_000
BFLOAT16_EPS = 2.0**-7  # between neighbours in [1, 2)
FLOAT32_HALF_ULP = 2.0**-24

Array = np.ndarray[Any, np.dtype[Any]]


def contribution(rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).standard_normal(NUMEL)).bfloat16()


def summed(algorithm: str, wire_dtype: str | None = None) -> tuple[Array, int]:
    """The sum that every rank ends with, and the bytes that rank 0 sent."""

    def body(transport: Transport) -> tuple[torch.Tensor, int]:
        with Communicator(transport, timeout=30) as comm:
            return comm.all_reduce(contribution(comm.rank), "sum", algorithm, wire_dtype=wire_dtype), (
                comm.counters.bytes_sent
            )

    found = run_thread_ranks(body, WORLD_SIZE, timeout=30)
    assert all(torch.equal(each, found[0][0]) for each, _ in found)
    return found[0][0].double().numpy(), found[0][1]


def half_ulp(values: Array) -> Array:
    """Half the distance between neighbouring bfloat16 numbers at each value."""
    exponent = np.floor(np.log2(np.maximum(np.abs(values), 2.0**-126)))
    spacing: Array = BFLOAT16_EPS * 2.0**exponent
    return spacing / 2


def test_the_error_of_bfloat16_sums(record_property: Any) -> None:
    stacked = np.stack([contribution(rank).double().numpy() for rank in range(WORLD_SIZE)])
    exact, magnitude = stacked.sum(axis=0), np.abs(stacked).sum(axis=0)
    ring, sent = summed("ring")
    wide, sent_wide = summed("ring", "float32")
    direct, _ = summed("direct")
    errors = {name: np.abs(each - exact) for name, each in (("ring", ring), ("float32", wide), ("direct", direct))}
    for name, each in errors.items():
        record_property(name, f"largest {each.max():.4f}, mean {each.mean():.5f}")
        print(f"{name:8} error: largest {each.max():.4f}, mean {each.mean():.5f}")
    rounded_once = half_ulp(exact) + (WORLD_SIZE - 1) * FLOAT32_HALF_ULP * magnitude
    assert (errors["direct"] <= rounded_once).all()
    assert (errors["float32"] <= rounded_once).all()
    assert (errors["ring"] <= (WORLD_SIZE - 1) * BFLOAT16_EPS / 2 * magnitude).all()
    assert not (errors["ring"] <= rounded_once).all(), "nothing would be gained by rounding once"
    assert errors["ring"].mean() > 1.5 * errors["direct"].mean()
    assert sent_wide == 2 * sent


@pytest.mark.parametrize(("algorithm", "wire_dtype"), [("naive", None), ("direct", None), ("ring", "float32")])
def test_small_addends_are_not_lost(algorithm: str, wire_dtype: str | None) -> None:
    """256 and seven ones are 263, which rounds to 264; rounded at each hop some of the ones are lost."""

    def body(transport: Transport) -> list[float]:
        with Communicator(transport, timeout=30) as comm:
            x = torch.full((16,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
            return comm.all_reduce(x, "sum", algorithm, wire_dtype=wire_dtype).tolist()

    assert run_thread_ranks(body, WORLD_SIZE, timeout=30) == [[264.0] * 16] * WORLD_SIZE

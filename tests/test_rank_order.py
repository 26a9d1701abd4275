"""``order="rank"``: the same bits whatever the algorithm and the slicing, equal to a fold computed in NumPy."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from microddp import Communicator
from microddp.transport.thread import run_thread_ranks

pytestmark = pytest.mark.timeout(120)

WORLD_SIZES = range(2, 9)
SIZES = (1, 7, 64, 500, 2051)
SLICES = (256, 1040, None)
ALGORITHMS = ("naive", "direct", "full_ring")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIRES = (None, torch.bfloat16, torch.float8_e5m2, torch.float32)

Array = np.ndarray[Any, np.dtype[Any]]


@lru_cache(maxsize=256)
def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes, so that another order of summation shows in the bits."""
    random = np.random.default_rng([numel, rank])
    values = random.standard_normal(numel) * 2.0 ** random.uniform(-6, 6, numel)
    return torch.from_numpy(values).to(dtype)


def folded(world_size: int, numel: int, dtype: torch.dtype, op: str, wire: torch.dtype | None) -> torch.Tensor:
    """((x0 + x1) + x2) + …, in float32, divided there for avg; rounded once, to what travels."""
    travels = wire or dtype
    contributions = [contribution(rank, numel, dtype).to(travels) for rank in range(world_size)]
    total: Array = contributions[0].float().numpy()
    for each in contributions[1:]:
        total = (total + each.float().numpy()).astype(np.float32)
    if op == "avg":
        total = (total / np.float32(world_size)).astype(np.float32)
    return torch.from_numpy(total).to(travels).to(dtype)


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def reduced(world_size: int, algorithm: str, slice_nbytes: int | None, wire: torch.dtype | None) -> list[list[str]]:
    """By rank: for each dtype and operator, one hash over the results of all sizes."""

    def body(transport: Any) -> list[str]:
        hashes = []
        with Communicator(transport, timeout=60, slice_nbytes=slice_nbytes) as comm:
            for dtype in DTYPES:
                for op in ("sum", "avg"):
                    results = []
                    for numel in SIZES:
                        x = contribution(comm.rank, numel, dtype).clone()
                        results.append(comm.all_reduce(x, op, algorithm, "rank", wire_dtype=wire))
                    hashes.append(digest(results))
        return hashes

    return run_thread_ranks(body, world_size, timeout=60)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_hash_over_algorithms_and_slices(world_size: int) -> None:
    for wire in WIRES if world_size == 3 else (None,):
        wanted = [
            digest([folded(world_size, numel, dtype, op, wire) for numel in SIZES])
            for dtype in DTYPES
            for op in ("sum", "avg")
        ]
        assert len(set(wanted)) == len(wanted)
        for algorithm in ALGORITHMS:
            for slice_nbytes in SLICES:
                for rank, found in enumerate(reduced(world_size, algorithm, slice_nbytes, wire)):
                    assert found == wanted, f"{algorithm}, slices of {slice_nbytes}, wire {wire}, rank {rank}"


def test_another_order_has_another_hash() -> None:
    """What the test above compares does depend on the order."""
    forwards = folded(5, 1000, torch.float32, "sum", None)
    values = [contribution(rank, 1000, torch.float32).numpy() for rank in range(5)]
    backwards = values[4]
    for each in values[3::-1]:
        backwards = backwards + each
    assert digest([forwards]) != digest([torch.from_numpy(backwards)])

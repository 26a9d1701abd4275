"""The Gloo transport keeps the contract, and every mismatch reaches every rank in time, as an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.transport import gloo_cases
from tests.transport.contract import contract_cases
from tests.transport.contract_failures import failure_cases
from tests.transport.gloo_pool import GlooPool, gloo_pools

__all__ = ["gloo_pools"]

pytestmark = pytest.mark.timeout(100)

Pools = Callable[[int], GlooPool]
PERIOD_S = 0.5

MISMATCHES: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[str, ...]]] = {
    # name: (what the odd rank's header changes, (others', its) number of elements, what the text names)
    "numel": ({"shape": (5,)}, (3, 5), ("shape", "(3,)", "(5,)")),
    "numel, less": ({"shape": (2,)}, (3, 2), ("shape", "(3,)", "(2,)")),
    "shape": ({"shape": (2, 3)}, (6, 6), ("shape", "(6,)", "(2, 3)")),
    "dtype": ({"dtype": "torch.float64"}, (3, 3), ("dtype", "torch.float32", "torch.float64")),
    "op": ({"op": "max"}, (3, 3), ("op", "'sum'", "'max'")),
    "algorithm": ({"algorithm": "tree"}, (3, 3), ("algorithm", "'ring'", "'tree'")),
    "0 against 3": ({"shape": (3,)}, (0, 3), ("shape", "(0,)", "(3,)")),
    "3 against 0": ({"shape": (0,)}, (3, 0), ("shape", "(3,)", "(0,)")),
    "empty, dtype": ({"dtype": "torch.int8"}, (0, 0), ("dtype", "torch.float32", "torch.int8")),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name, _ in contract_cases()])
def test_contract(gloo_pools: Pools, name: str, world_size: int) -> None:
    gloo_pools(world_size).run(gloo_cases.contract, name)


@pytest.mark.parametrize("name", [name for name, _ in failure_cases()])
def test_broken_contract(gloo_pools: Pools, name: str) -> None:
    seconds = gloo_pools(3).run(gloo_cases.broken_contract, name)
    assert max(seconds) < PERIOD_S + 2


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_reaches_every_rank(gloo_pools: Pools, name: str, odd: int) -> None:
    changes, numels, named = MISMATCHES[name]
    reports = gloo_pools(4).run(gloo_cases.mismatch, odd, changes, numels)
    print(f"{name}, rank {odd}: " + " ".join(f"{first[2]:.2f}" for first, _ in reports))
    others = ", ".join(str(rank) for rank in range(4) if rank != odd)
    for rank, ((kind, text, seconds), (later, why, _)) in enumerate(reports):
        assert kind == "MismatchError", text
        assert text.startswith(f"rank {rank} of 4: all_reduce by ")
        assert all(part in text for part in (*named, f"on rank {odd}", f"on ranks {others}")), text
        assert seconds < PERIOD_S + 2
        assert later == "ClosedError" and named[0] in why


def test_off_by_one(gloo_pools: Pools) -> None:
    reports = gloo_pools(4).run(gloo_cases.off_by_one, 1)
    print("off by one: " + " ".join(f"{seconds:.2f}" for _, _, seconds in reports))
    for kind, text, seconds in reports:
        assert kind == "MismatchError", text
        assert "shape is (1,) on ranks 0, 2, 3, (7,) on rank 1" in text
        assert seconds < PERIOD_S + 2


def test_rejected_by_all_leaves_the_transport_usable(gloo_pools: Pools) -> None:
    for reports in gloo_pools(4).run(gloo_cases.rejected_by_all):
        assert [kind for kind, _, _ in reports] == ["", ""], reports


@pytest.mark.parametrize("numel", [3, 0])
def test_rejected_by_one_reaches_the_others(gloo_pools: Pools, numel: int) -> None:
    reports = gloo_pools(4).run(gloo_cases.rejected_by_one, 1, numel)
    for rank, (first, *later) in enumerate(reports):
        kind, text, seconds = first
        assert kind == "RemoteError" and "rank 1 refused collective 0: ValueError: no such operator" in text, text
        assert seconds < PERIOD_S + 2
        assert rank == 1 or later[0][0] == "ClosedError"


def test_late_rank_and_use_after_a_timeout(gloo_pools: Pools) -> None:
    reports = gloo_pools(3).run(gloo_cases.late_rank, 1, 1.0)
    for rank, ((kind, text, seconds), (later, why, _)) in enumerate(reports):
        assert kind == "CollectiveTimeoutError", text
        assert "not known to have entered it: rank 1" in text
        assert later == "ClosedError" and "deadline" in why
        if rank != 1:
            assert 0.9 < seconds < 3.0
            assert text.startswith(f"rank {rank} of 3: all_reduce by ring, collective 0, step 0, ")


def test_two_worlds_in_one_process(gloo_pools: Pools) -> None:
    gloo_pools(3).run(gloo_cases.two_worlds)


def test_close_is_quick_and_final(gloo_pools: Pools) -> None:
    for seconds in gloo_pools(3).run(gloo_cases.close_variants):
        assert max(seconds) < 2.0, seconds


def test_same_header_other_sizes(gloo_pools: Pools) -> None:
    """Plans that disagree under one header: Gloo itself would abort the process that gets more than it expects."""
    for kind, text, _ in gloo_pools(3).run(gloo_cases.same_header_other_sizes, 1):
        assert kind == "CollectiveTimeoutError", text

"""Ranks that call different collectives: every rank raises, with both ranks and both values in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from microddp import ClosedError, Communicator, MismatchError, TransportError
from tests.api.tools import outcomes

pytestmark = pytest.mark.timeout(60)

Call = Callable[[Communicator], Any]

MISMATCHES: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "numel": (
        lambda c: c.all_reduce(torch.ones(4), algorithm="ring"),
        lambda c: c.all_reduce(torch.ones(8), algorithm="ring"),
        ("(4,)", "(8,)"),
    ),
    "same numel, another shape": (
        lambda c: c.all_reduce(torch.ones(2, 3)),
        lambda c: c.all_reduce(torch.ones(3, 2)),
        ("(2, 3)", "(3, 2)"),
    ),
    "dtype": (
        lambda c: c.all_reduce(torch.ones(4)),
        lambda c: c.all_reduce(torch.ones(4, dtype=torch.int32)),
        ("float32", "int32"),
    ),
    "op": (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(4), op="max"), ("sum", "max")),
    "algorithm": (
        lambda c: c.all_reduce(torch.ones(4), algorithm="ring"),
        lambda c: c.all_reduce(torch.ones(4), algorithm="tree"),
        ("ring", "tree"),
    ),
    "order": (
        lambda c: c.all_reduce(torch.ones(4), algorithm="full_ring"),
        lambda c: c.all_reduce(torch.ones(4), algorithm="full_ring", order="rank"),
        ("with algorithm full_ring", "full_ring in rank order"),
    ),
    "0 against 3": (
        lambda c: c.all_reduce(torch.ones(0)),
        lambda c: c.all_reduce(torch.ones(3)),
        ("(0,)", "(3,)"),
    ),
    "root": (lambda c: c.broadcast(torch.ones(4)), lambda c: c.broadcast(torch.ones(4), 3), ("root", "3")),
    "collective": (lambda c: c.barrier(), lambda c: c.all_gather(torch.ones(4)), ("barrier", "all_gather")),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_every_rank_raises_with_ranks_and_both_values(name: str, odd_rank: int) -> None:
    usual, odd, values = MISMATCHES[name]

    def body(comm: Communicator) -> Any:
        try:
            return (odd if comm.rank == odd_rank else usual)(comm)
        finally:
            with pytest.raises(ClosedError, match="cannot be used: .* failed: MismatchError"):
                comm.all_reduce(torch.ones(1))

    for rank, error in enumerate(outcomes(body, 4)):
        assert type(error) is MismatchError, error
        text = str(error)
        assert f"rank {rank} of 4" in text
        found = re.search(r"rank (\d) called \w+ with .*, rank (\d) with", text)
        assert found and str(odd_rank) in found.groups(), text
        assert all(value in found.string[found.start() :] for value in values), text


def test_off_by_one_call_with_another_header_is_seen() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank != 1:
            comm.all_reduce(torch.ones(4))
        return comm.all_reduce(torch.ones(9))

    for error in outcomes(body, 4):
        assert type(error) is MismatchError
        assert "(4,)" in str(error) and "(9,)" in str(error) and "rank 1" in str(error)


def test_one_call_too_few_is_seen_when_the_rank_leaves() -> None:
    def body(comm: Communicator) -> Any:
        comm.all_reduce(torch.ones(4))
        return None if comm.rank == 1 else comm.all_reduce(torch.ones(4))

    errors = outcomes(body, 4)
    assert errors.pop(1) is None
    for error in errors:
        assert isinstance(error, TransportError)
        assert "rank 1" in str(error)

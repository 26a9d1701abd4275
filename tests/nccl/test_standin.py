"""The stand-in for NCCL, called through CuPy's real bindings: what it moves, in which order, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.nccl.build import STANDIN_VERSION
from tests.nccl.standin_tools import (
    bytes_of,
    counters,
    failing,
    group,
    last_error,
    ring_step,
    run_ranks,
)

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

INVALID_ARGUMENT, INVALID_USAGE = 4, 5
DTYPES = (torch.bfloat16, torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.int16)


def random_tensor(seed: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Any bits (but bool's own): what travels must not be looked at as numbers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    itemsize = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (numel * itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_carries_every_type_bit_by_bit(world_size: int, dtype: torch.dtype) -> None:
    """Whole tensors go all the way round: after world_size − 1 steps each rank has seen every other's."""
    numel = 100_003  # more than a socket's buffer holds

    def body(communicator: Any, rank: int) -> tuple[list[bytes], list[int]]:
        held, seen = random_tensor(rank, dtype, numel), []
        for _ in range(world_size - 1):
            arrived = torch.zeros_like(held)
            ring_step(communicator, rank, world_size, held, arrived)
            seen.append(bytes_of(arrived))
            held = arrived
        return seen, counters(communicator)

    originals = [bytes_of(random_tensor(rank, dtype, numel)) for rank in range(world_size)]
    nbytes = sum(len(each) for each in originals[1:])
    for rank, (seen, counted) in enumerate(run_ranks(world_size, body)):
        assert seen == [originals[(rank - step) % world_size] for step in range(1, world_size)]
        assert counted == [nbytes, nbytes, world_size - 1, world_size - 1]


def test_both_ends_learn_of_byte_counts_that_differ(standin: Any) -> None:
    """Only the stand-in sees this; the communicator is of no use after it."""
    from cupy.cuda import nccl

    met = threading.Barrier(2)

    def body(communicator: Any, rank: int) -> tuple[int, int, int, str]:
        memory = torch.zeros(16, dtype=torch.uint8)
        call = communicator.send if rank == 0 else communicator.recv
        first = failing(lambda: call(memory.data_ptr(), 16 - 8 * rank, nccl.NCCL_UINT8, 1 - rank, 0))
        asynchronous = failing(communicator.check_async_error)
        later = failing(lambda: call(memory.data_ptr(), 16, nccl.NCCL_UINT8, 1 - rank, 0))
        text = last_error(communicator)
        met.wait()  # neither end closes before both have looked
        return first, asynchronous, later, text

    sender, receiver = run_ranks(2, body)
    assert sender[:3] == receiver[:3] == (INVALID_USAGE,) * 3
    assert "send of 16 bytes meets 8 bytes on rank 1" in sender[3]
    assert "receive of 8 bytes meets 16 bytes on rank 0" in receiver[3]


def test_sends_to_oneself_match_in_order_and_must_match() -> None:
    from cupy.cuda import nccl

    def body(communicator: Any, rank: int) -> None:
        ours = torch.arange(8, dtype=torch.uint8)
        theirs = torch.zeros(8, dtype=torch.uint8)

        def call(kind: str, tensor: torch.Tensor) -> None:
            getattr(communicator, kind)(tensor.data_ptr(), tensor.numel(), nccl.NCCL_UINT8, rank, 0)

        with group():  # receives first, and the longer one first
            call("recv", theirs[:5])
            call("recv", theirs[5:])
            call("send", ours[3:])
            call("send", ours[:3])
        assert theirs.tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
        for kinds in (["send"], ["recv"], ["send", "recv", "send"]):
            nccl.groupStart()
            for kind in kinds:
                call(kind, ours)
            assert failing(nccl.groupEnd) == INVALID_USAGE
        nccl.groupStart()
        call("send", ours[:4])
        call("recv", theirs[:5])
        assert failing(nccl.groupEnd) == INVALID_USAGE
        communicator.check_async_error()  # nothing was launched: the communicator is whole

    run_ranks(1, body)


def test_an_error_in_a_group_is_told_twice_and_drops_the_group() -> None:
    from cupy.cuda import nccl

    world_size = 2

    def body(communicator: Any, rank: int) -> None:
        ours, theirs = torch.full((4,), float(rank)), torch.zeros(4)
        nccl.groupStart()
        nccl.groupStart()
        communicator.send(ours.data_ptr(), 16, nccl.NCCL_UINT8, 1 - rank, 0)
        bad = (ours.data_ptr(), 16, nccl.NCCL_UINT8, world_size, 0)
        assert failing(lambda: communicator.recv(*bad)) == INVALID_ARGUMENT
        nccl.groupEnd()  # the inner end says nothing
        assert failing(nccl.groupEnd) == INVALID_ARGUMENT
        assert failing(nccl.groupEnd) == INVALID_USAGE  # there is none any more
        ring_step(communicator, rank, world_size, ours, theirs)
        assert theirs.tolist() == [1.0 - rank] * 4
        assert counters(communicator) == [16, 16, 1, 1]  # nothing of the first group went

    run_ranks(world_size, body)


BAD_CALLS: dict[str, Callable[[Any, Any, int], object]] = {
    "unknown type": lambda api, each, memory: each.send(memory, 4, 12, 1, 0),
    "negative type": lambda api, each, memory: each.send(memory, 4, -1, 1, 0),
    "negative peer": lambda api, each, memory: each.send(memory, 4, api.NCCL_UINT8, -1, 0),
    "peer beyond the last": lambda api, each, memory: each.recv(memory, 4, api.NCCL_UINT8, 2, 0),
    "no memory": lambda api, each, memory: each.recv(0, 4, api.NCCL_UINT8, 1, 0),
}


def test_bad_calls_are_refused_and_leave_everything_usable() -> None:
    from cupy.cuda import nccl

    def body(communicator: Any, rank: int) -> dict[str, int]:
        ours, theirs = torch.full((4,), float(rank)), torch.zeros(4)
        found = {
            name: failing(lambda call=call: call(nccl, communicator, ours.data_ptr()))  # type: ignore[misc]
            for name, call in BAD_CALLS.items()
        }
        assert failing(lambda: communicator.allReduce(*(2 * [ours.data_ptr()]), 4, 7, 0, 0)) == INVALID_USAGE
        nccl.groupStart()
        for stream in (1 << 40, 1 << 41):  # streams of nobody
            communicator.send(ours.data_ptr(), 4, nccl.NCCL_UINT8, 1 - rank, stream)
        assert failing(nccl.groupEnd) == INVALID_USAGE
        ring_step(communicator, rank, 2, ours, theirs)
        assert theirs.tolist() == [1.0 - rank] * 4
        return found

    assert run_ranks(2, body) == [dict.fromkeys(BAD_CALLS, INVALID_ARGUMENT)] * 2


def test_a_rank_is_taken_once_and_a_communicator_is_asked_only_while_open() -> None:
    from cupy.cuda import nccl

    assert nccl.get_version() == STANDIN_VERSION
    unique_id = nccl.get_unique_id()
    communicator = nccl.NcclCommunicator(1, unique_id, 0)
    assert (communicator.rank_id(), communicator.size(), communicator.device_id()) == (0, 1, 0)
    assert failing(lambda: nccl.NcclCommunicator(1, unique_id, 0)) == INVALID_USAGE
    for size, rank in ((0, 0), (1, 1), (2, -1)):
        assert failing(lambda args=(size, unique_id, rank): nccl.NcclCommunicator(*args)) == INVALID_ARGUMENT  # type: ignore[misc]
    communicator.destroy()
    communicator.destroy()
    assert failing(communicator.rank_id) == INVALID_ARGUMENT

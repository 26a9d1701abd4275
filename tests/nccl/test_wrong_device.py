"""Arrays that are not on the device of the NCCL transport are refused by all ranks, by name; nothing is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from microddp import Communicator
from microddp.errors import RemoteError
from tests.nccl.ranks_tools import with_comms
from tests.nccl.standin_runtime import StandInRuntime

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]


class Elsewhere(StandInRuntime):
    """A device without memory that a host could see: what is on the CPU is elsewhere for it."""

    device = torch.device("meta")


class Another(StandInRuntime):
    """A device of the right type and another number."""

    device = torch.device("meta", 1)


def on_the_host() -> dict[str, Any]:
    return {
        "torch": torch.ones(3),
        "numpy": np.ones(3, np.float32),
        "pair": (torch.ones(3), torch.ones(3, dtype=torch.int64)),
    }


@pytest.mark.parametrize("kind", on_the_host())
def test_an_array_of_the_host_is_refused_by_all_ranks(kind: str) -> None:
    def body(comm: Communicator) -> None:
        x = on_the_host()[kind]
        what = r"x(\[0\])? is on device cpu; the nccl transport takes tensors on meta"
        with pytest.raises(TypeError, match=f"^rank {comm.rank} of 3, all_reduce: {what}$"):
            comm.all_reduce(x, "argmax" if kind == "pair" else "sum")
        if kind != "pair":
            for call in (comm.broadcast, comm.reduce, comm.all_gather, comm.reduce_scatter):
                with pytest.raises(TypeError, match=what):
                    call(x)
        assert comm.counters.messages_sent == 0

    with_comms(3, body, make_runtime=Elsewhere).checked()


def test_a_device_of_another_number_is_refused_by_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=rf"rank {comm.rank} of 2.*x is on device meta; this rank works on meta:1"):
            comm.all_reduce(torch.ones(3, device="meta"))

    with_comms(2, body, make_runtime=Another).checked()


def finished(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x)
    comm.synchronize()


def test_a_wrong_device_on_one_rank_reaches_the_others() -> None:
    """Who has the right one hears of it, at once."""

    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(3))
        what = "x is on device meta; the nccl transport takes tensors on cpu"
        if comm.rank == 1:
            with pytest.raises(TypeError, match=f"rank 1 of 3, all_reduce: {what}"):
                comm.all_reduce(torch.ones(3, device="meta"))
        else:
            with pytest.raises(
                RemoteError, match=f"rank {comm.rank} of 3.*rank 1 refused collective 1: TypeError.*{what}"
            ):
                finished(comm, torch.ones(3))

    ranks = with_comms(3, body)
    ranks.checked()
    assert ranks.seconds < 5

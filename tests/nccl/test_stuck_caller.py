"""A caller that the host holds up while it enqueues: its collective has a deadline too."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from microddp import Communicator
from microddp.errors import CollectiveTimeoutError
from microddp.transport.nccl import NcclTransport
from tests.nccl.ranks_tools import with_comms
from tests.nccl.standin_runtime import StandInRuntime

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 30.0


class Held(StandInRuntime):
    """Its launches block the host, as loading a kernel may, while ``hold`` does."""

    hold: Callable[[], None] | None = None

    def launch(self, stream: object, call: Callable[[], object]) -> None:
        if self.hold is not None:
            self.hold()
        super().launch(stream, call)  # type: ignore[arg-type]


def reduce(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x, algorithm="ring")
    comm.synchronize()


@pytest.mark.parametrize("held", [(1,), (0, 1)])
def test_a_launch_that_blocks_ends_at_the_deadline_on_every_rank(standin: object, held: tuple[int, ...]) -> None:
    def body(comm: Communicator) -> str:
        x = torch.ones(4000)
        reduce(comm, x)
        transport = comm._transport
        assert isinstance(transport, NcclTransport) and isinstance(transport.runtime, Held)

        def hold() -> None:
            until = time.monotonic() + PATIENCE_S
            while transport.failure is None:
                assert time.monotonic() < until, "nobody noticed"
                time.sleep(0.01)  # a bounded poll: what is held up has nothing to be woken by

        if comm.rank in held:
            transport.runtime.hold = hold
        with pytest.raises(CollectiveTimeoutError) as caught:
            reduce(comm, x)
        return str(caught.value)

    ranks = with_comms(2, body, make_runtime=lambda: Held(blocking=False), timeout=1.0)
    assert all("deadline passed" in text for text in ranks.checked())

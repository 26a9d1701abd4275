"""Tensors that autograd or inference mode knows: written in place, never differentiated."""

from __future__ import annotations

import pytest
import torch

from microddp import Communicator
from microddp.arrays import operand_of
from tests.api.tools import run

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "how", ["leaf under no_grad", "leaf in the background", "result under no_grad", "inference", "inference outside"]
)
def test_autograd(how: str) -> None:
    def body(comm: Communicator) -> None:
        if how == "leaf under no_grad":
            x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
            with torch.no_grad():
                assert comm.all_reduce(x) is x
            assert x.is_leaf and x.requires_grad
            assert x._version > 0
        elif how == "leaf in the background":  # where grad mode is on
            x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
            with torch.no_grad():
                work = comm.all_reduce(x, async_op=True)
            assert work.wait() is x and x.is_leaf
        elif how == "result under no_grad":
            leaf = torch.full((3,), comm.rank + 1.0, requires_grad=True)
            x = leaf.exp()  # its backward needs the result
            with torch.no_grad():
                x.copy_(leaf)
                version = x._version
                comm.all_reduce(x)
            assert x._version > version
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                x.sum().backward()
        else:
            with torch.inference_mode():
                x = torch.full((3,), comm.rank + 1.0)
                if how == "inference":
                    assert comm.all_reduce(x) is x
            if how == "inference outside":
                assert comm.all_reduce(x, async_op=True).wait() is x
            comm.all_reduce(torch.ones(3))  # nothing of the inference mode stays behind
            parts = x.clone()
            assert comm.all_reduce(parts[::2]).tolist() == [6.0, 6.0]
        assert x.detach().tolist() == [3.0] * 3

    run(body, 2)


def test_autograd_is_told_of_what_a_transport_wrote_as_bytes() -> None:
    x = torch.ones(4)
    operand = operand_of(x, "x")
    flat = operand.flat()
    assert flat.data_ptr() == x.data_ptr()
    assert not operand_of(torch.ones(4, requires_grad=True), "x").flat().requires_grad
    version = x._version
    operand.store(flat)
    assert x._version > version

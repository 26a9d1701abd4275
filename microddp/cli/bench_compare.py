"""torch's own all_reduce beside ours, in the same processes: ``microddp bench --compare``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch

from microddp.cli.usage import UsageError

if TYPE_CHECKING:
    from microddp.communicator import Communicator

__all__ = ["COMPARED", "check_gpus", "check_op", "torch_all_reduce"]

COMPARED: Final = {"gloo": "gloo", "nccl": "nccl"}
"""Torch's backends, and the transport of ours that moves tensors on the same devices."""

_OPS: Final = {
    "sum": "SUM",
    "prod": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "avg": "AVG",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_MISSING: Final = {"gloo": ("avg",), "nccl": ("band", "bor", "bxor")}


def check_op(backend: str, op: str) -> None:
    """Raises UsageError if torch's ``backend`` has no such operator to compare with."""
    if op not in _OPS or op in _MISSING[backend]:
        known = ", ".join(name for name in _OPS if name not in _MISSING[backend])
        raise UsageError(f"--compare {backend}: torch's {backend} has no {op!r} to compare with; it has {known}")


def check_gpus(num_ranks: int | None) -> int:
    """How many local ranks can each have a GPU: as many as asked for, by default as many as there are GPUs.

    Raises:
        UsageError: there are too few, or CuPy or NCCL is missing; the text says what to install.
    """
    from microddp.device_cuda import CudaRuntime
    from microddp.errors import TransportError
    from microddp.transport.nccl_api import load_nccl

    try:
        CudaRuntime()
        load_nccl()
    except TransportError as error:
        raise UsageError(str(error)) from error
    count = torch.cuda.device_count()
    if num_ranks is not None and num_ranks > count:
        raise UsageError(f"--ranks {num_ranks}: over nccl each rank needs a GPU of its own, and there are {count}")
    return count if num_ranks is None else num_ranks


@contextlib.contextmanager
def torch_all_reduce(
    backend: str, comm: Communicator, op: str, sample: torch.Tensor
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Within it, torch's in-place all_reduce over ``backend`` between the ranks of ``comm``.

    On a GPU it returns before its result is there, like ours.

    Args:
        backend: "gloo" or "nccl"; a process group is made, and ended with this.
        comm: says who the ranks are; the variables that torchrun sets say where.
        op: an operator's name.
        sample: a few elements of what will be reduced, to see that torch can.

    Raises:
        UsageError: torch has no such backend, or does not reduce such elements over it.
    """
    import torch.distributed as dist

    if not getattr(dist, f"is_{backend}_available")():
        raise UsageError(f"--compare {backend}: this build of torch has no {backend}")
    dist.init_process_group(
        backend, rank=comm.rank, world_size=comm.world_size, timeout=timedelta(seconds=comm.timeout)
    )
    reduce_op = getattr(dist.ReduceOp, _OPS[op])
    try:
        try:
            dist.all_reduce(sample, reduce_op)
        except (RuntimeError, TypeError, ValueError) as error:
            dtype = str(sample.dtype).removeprefix("torch.")
            reason = str(error).partition("\n")[0]
            text = f"--compare {backend}: torch's {backend} does not reduce {dtype} by {op!r}: {reason}"
            raise UsageError(text) from error
        yield lambda tensor: dist.all_reduce(tensor, reduce_op)
    finally:
        dist.destroy_process_group()

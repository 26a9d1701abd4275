"""How a program gets a communicator: from its environment, on threads, or on processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from microddp.communicator import DEFAULT_TIMEOUT_S, Communicator
from microddp.connecting import connect
from microddp.transport.base import Transport
from microddp.transport.thread import run_thread_ranks

__all__ = ["init", "run_processes", "run_threads"]

Result = TypeVar("Result")


def init(
    transport: str | Transport | None = None,
    *,
    device: int | str | torch.device | None = None,
    group: Any = None,
    mpi: Any = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    slice_nbytes: int | None = None,
    num_slots: int | None = None,
) -> Communicator:
    """The communicator of this process.

    The other ranks are found by the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them;
    or by ``group`` or ``mpi``. Without any of these a communicator is a world of its own.

    Args:
        transport: "nccl" for tensors on GPUs, "gloo" for tensors on the CPU. None: "nccl" if ``device`` is a CUDA
            device, else "gloo", or no transport at all for a world of one rank. Or a ``Transport``.
        device: "cuda", "cuda:1" or 1: the GPU of this rank. Without a number: that of LOCAL_RANK, which torchrun sets,
            else torch's current device. One GPU has one rank.
        group: a torch process group, whose ranks take part and whose store is used; torch.distributed.group.WORLD for
            all of them.
        mpi: an mpi4py communicator, whose ranks take part; all of them must call.
        timeout: seconds that one collective may take, and that the ranks may take to find each other.
        slice_nbytes, num_slots: as in ``Communicator``.

    Raises:
        ValueError: unknown transport; arguments that exclude each other; a variable that is missing or makes no sense.
        TransportError: CuPy, NCCL or a GPU is missing (the text says what to install), two ranks have one GPU, or the
            other ranks could not be reached.
    """
    connected = transport if isinstance(transport, Transport) else connect(transport, device, group, mpi, timeout)
    try:
        return Communicator(connected, timeout=timeout, slice_nbytes=slice_nbytes, num_slots=num_slots)
    except BaseException:
        connected.close()
        raise


def run_threads(
    fn: Callable[..., Result], world_size: int = 4, *, args: tuple[Any, ...] = (), timeout: float | None = None
) -> list[Result]:
    """Calls ``fn(comm, *args)`` on one thread per rank of this process; returns the results in rank order.

    ``args`` are shared between the ranks, not copied. When a rank raises, so do the others' collectives, and the first
    error is raised here, with notes on its rank and on what the others raised.

    Args:
        timeout: seconds for all of it; None: no limit but that of each collective.

    Raises:
        CollectiveTimeoutError: ranks were still running after ``timeout``.
    """

    def body(transport: Transport) -> Result:
        with Communicator(transport) as comm:
            return fn(comm, *args)

    return run_thread_ranks(body, world_size, timeout=timeout)


def run_processes(
    fn: Callable[..., Result],
    world_size: int = 4,
    *,
    args: tuple[Any, ...] = (),
    timeout: float | None = None,
    device: str = "cpu",
) -> list[Result]:
    """Calls ``fn(comm, *args)`` on one new process per rank; returns the results in rank order.

    Args:
        fn: a function of an importable module, as the processes import it by name.
        args: pickled, as are the results: tensors are copied.
        timeout: seconds for all of it, the start of the processes included; None: no limit.
        device: "cpu": over gloo. "cuda": over nccl, rank r on GPU r, which is then torch's current device.

    Raises:
        TypeError: ``fn`` or an argument cannot be pickled; nothing was started.
        ValueError: another device.
        TransportError: a rank was killed or exited before it returned; or there are too few GPUs, or CuPy is missing.
        CollectiveTimeoutError: ranks were still running after ``timeout``.
        Exception: whatever a rank raised first, with its rank and traceback.
    """
    from microddp.processes import run_process_ranks

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {device!r}")
    target = _call_on_gpu if device == "cuda" else _call_with_communicator
    return run_process_ranks(target, world_size, args=(fn, args), timeout=timeout)


def _call_with_communicator(transport: Transport, fn: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    with Communicator(transport) as comm:
        return fn(comm, *args)


def _call_on_gpu(transport: Transport, fn: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    """The transport that the processes have, over Gloo, stays open beside: by it they hear of each other's end."""
    with init("nccl") as comm:
        torch.cuda.set_device(torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()))
        return fn(comm, *args)

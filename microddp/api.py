"""How a program gets a communicator: from its environment, on threads, or on processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from microddp.communicator import DEFAULT_TIMEOUT_S, Communicator
from microddp.transport.base import Transport
from microddp.transport.thread import ThreadWorld, run_thread_ranks

__all__ = ["init", "run_processes", "run_threads"]

Result = TypeVar("Result")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init(
    transport: str | Transport | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    slice_nbytes: int | None = None,
    num_slots: int | None = None,
) -> Communicator:
    """The communicator of this process.

    Args:
        transport: None: "gloo" if any of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is set (as torchrun does), else
            a world of this rank alone. "gloo" needs these variables. Or a ``Transport``.
        timeout: seconds that one collective may take, and that the ranks may take to find each other.
        slice_nbytes, num_slots: as in ``Communicator``.

    Raises:
        ValueError: unknown transport; a variable that is missing or makes no sense, by name.
        TransportError: the other ranks could not be reached.
    """
    connected = transport if isinstance(transport, Transport) else _connect(transport, timeout)
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
    fn: Callable[..., Result], world_size: int = 4, *, args: tuple[Any, ...] = (), timeout: float | None = None
) -> list[Result]:
    """Calls ``fn(comm, *args)`` on one new process per rank, over gloo; returns the results in rank order.

    Args:
        fn: a function of an importable module, as the processes import it by name.
        args: pickled, as are the results: tensors are copied.
        timeout: seconds for all of it, the start of the processes included; None: no limit.

    Raises:
        TypeError: ``fn`` or an argument cannot be pickled; nothing was started.
        TransportError: a rank was killed or exited before it returned.
        CollectiveTimeoutError: ranks were still running after ``timeout``.
        Exception: whatever a rank raised first, with its rank and traceback.
    """
    from microddp.processes import run_process_ranks

    return run_process_ranks(_call_with_communicator, world_size, args=(fn, args), timeout=timeout)


def _call_with_communicator(transport: Transport, fn: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    with Communicator(transport) as comm:
        return fn(comm, *args)


def _connect(name: str | None, timeout: float) -> Transport:
    if name is None:
        name = "gloo" if any(os.environ.get(each) for each in _VARIABLES) else "alone"
        if name == "alone":
            return ThreadWorld(1).transport(0)
    if name == "gloo":
        from microddp.rendezvous import gloo_from_environment

        return gloo_from_environment(timeout=timeout)
    if name == "thread":
        raise ValueError("threads are started together: call microddp.run_threads(fn, world_size=4)")
    raise ValueError(f"unknown transport {name!r}; known: 'gloo', 'thread' (by microddp.run_threads), or None")

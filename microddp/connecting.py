"""From what a caller knows (a transport's name, a device, a group) to a connected transport."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from microddp.errors import TransportError
from microddp.transport.base import Transport
from microddp.transport.thread import ThreadWorld

__all__ = ["connect"]

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Device = int | str | torch.device | None


def connect(name: str | None, device: Device, group: Any, mpi: Any, timeout: float) -> Transport:
    """The transport of ``microddp.init``; see there.

    Raises:
        ValueError: an unknown name, arguments that exclude each other, a variable that is missing or makes no sense.
        TransportError: something is not installed, or the other ranks could not be reached.
    """
    if group is not None and mpi is not None:
        raise ValueError("group and mpi are two ways to find the other ranks: give one of them")
    kind = _device_type(device)
    is_alone = group is None and mpi is None and not any(os.environ.get(each) for each in _VARIABLES)
    if name is None:
        name = "nccl" if kind == "cuda" else "alone" if is_alone else "gloo"
        if name == "alone":
            return ThreadWorld(1).transport(0)
    if name == "nccl":
        if kind == "cpu":
            raise ValueError(f"device {device!r} is not for the nccl transport, which moves tensors on CUDA devices")
        return _nccl(device, group, mpi, timeout)
    if name == "gloo":
        if kind == "cuda":
            raise ValueError(
                f"device {device!r} is not for the gloo transport, which moves tensors on the CPU: use 'nccl'"
            )
        return _gloo(group, mpi, timeout)
    if name == "thread":
        raise ValueError("threads are started together: call microddp.run_threads(fn, world_size=4)")
    raise ValueError(f"unknown transport {name!r}; known: 'gloo', 'nccl', 'thread' (by microddp.run_threads), or None")


def _gloo(group: Any, mpi: Any, timeout: float) -> Transport:
    from microddp import rendezvous

    if mpi is not None:
        return rendezvous.gloo_from_mpi(mpi, timeout)
    if group is not None:
        return rendezvous.gloo_from_process_group(group, timeout)
    return rendezvous.gloo_from_environment(timeout)


def _nccl(device: Device, group: Any, mpi: Any, timeout: float) -> Transport:
    """Finds the other ranks before it looks for the GPU, so that they hear of one that has none."""
    from microddp import rendezvous
    from microddp.transport.nccl import NcclTransport

    if mpi is not None:
        place = rendezvous.store_from_mpi(mpi, timeout)
    elif group is not None:
        place = rendezvous.store_from_process_group(group, timeout)
    elif any(os.environ.get(each) for each in _VARIABLES):
        place = rendezvous.store_from_environment(timeout)
    else:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        place = HashStore(), 0, 1
    return NcclTransport(*place, timeout=timeout, device=_own_device(device))


def _device_type(device: Device) -> str | None:
    if device is None:
        return None
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither a CPU nor a CUDA device")
    return kind


def _own_device(device: Device) -> torch.device | None:
    """The GPU of this rank: the one asked for, else number LOCAL_RANK of those that this process sees."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    index: int | None = found.index
    local_rank = os.environ.get("LOCAL_RANK")
    if index is not None:
        return found
    if local_rank is None:
        return None
    if not local_rank.isdecimal():
        raise ValueError(f"LOCAL_RANK={local_rank!r} must be an integer from 0 on")
    count = torch.cuda.device_count()
    if count > 1 and int(local_rank) >= count:
        raise TransportError(f"LOCAL_RANK is {local_rank}, but this process sees {count} CUDA devices: pass device=")
    return torch.device("cuda", int(local_rank) if count > 1 else 0)

"""How ranks that were started by something else (torchrun, a batch system, by hand) find each other.

By environment variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have torchrun's meaning. No global process
group is made, and one may be made before or after. Or through what the program has already: a torch process group,
or an MPI communicator.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from microddp.errors import TransportError
from microddp.transport.addresses import LOOPBACK, address_towards, is_loopback, local_address
from microddp.transport.bounded import CONNECT_GRACE_S, BoundedStore, run_bounded
from microddp.transport.gloo import GlooTransport
from microddp.transport.noticeboard import name_ranks

__all__ = [
    "gloo_from_environment",
    "gloo_from_mpi",
    "gloo_from_process_group",
    "store_from_environment",
    "store_from_mpi",
    "store_from_process_group",
]

DEFAULT_TIMEOUT_S: Final = 60.0
VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_lock = threading.Lock()
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Place:
    """Who this process is, and where the store is."""

    rank: int
    world_size: int
    host: str
    port: int


_stores: dict[_Place, Any] = {}
_mpi_numbers = itertools.count()
_mpi_servers: dict[int, Any] = {}  # by process id: of a server that a fork copied nothing answers


def store_from_environment(timeout: float = DEFAULT_TIMEOUT_S) -> tuple[Any, int, int]:
    """(store, rank, world_size), from the environment variables that torchrun sets.

    Every call returns a store under a new prefix, "microddp/0", "microddp/1", …: all ranks must make their
    communicators in the same order. The connection below them is made once for each address and rank.

    Raises:
        ValueError: a variable is missing or makes no sense; the text names it and its value.
        TransportError: the address is in use, or rank 0 did not answer within ``timeout`` seconds.
    """
    place = _read_environment()
    with _lock:
        if place not in _stores:
            _stores[place] = _connect(place, timeout)
        store = PrefixStore(f"microddp/{next(_numbers)}", _stores[place])
    return store, place.rank, place.world_size


def gloo_from_environment(timeout: float = DEFAULT_TIMEOUT_S) -> GlooTransport:
    """A ``GlooTransport`` between the ranks that the environment describes; raises like the above."""
    store, rank, world_size = store_from_environment(timeout)
    return GlooTransport(store, rank, world_size, timeout=timeout, address=_local_address())


def store_from_process_group(group: Any = None, timeout: float = DEFAULT_TIMEOUT_S) -> tuple[Any, int, int]:
    """(store, rank, world_size) over the store of torch's default group, for the ranks of ``group`` (None: all).

    Ranks are those within the group. Every call returns a store under a new prefix: all ranks of the group must make
    their communicators over it in the same order. How often each has called is counted in the store itself.

    Raises:
        ValueError: there is no default group, this process is not in ``group``, or its backend has no store (MPI).
        TransportError: the store does not answer, within ``timeout`` seconds.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    rank = -1 if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"this process, rank {dist.get_rank()} of the default group, is not in the group given")
    store = distributed_c10d._get_default_store()
    if store is None:
        raise ValueError(f"a group of backend {dist.get_backend()!r} has no store: pass its MPI communicator instead")
    ranks = dist.get_process_group_ranks(group)
    # Names of groups are used again once all groups were destroyed, for other ranks maybe.
    members = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    name = (distributed_c10d._get_default_group() if group is None else group).group_name
    prefix = f"microddp/group/{name}/{members}"
    who = f"rank {rank} of {len(ranks)}"
    try:
        number = BoundedStore(store, time.monotonic() + timeout, who).add(f"{prefix}/calls/{rank}", 1)
    except (RuntimeError, OSError) as error:
        raise TransportError(f"{who}: the store of the process group does not answer: {error}") from error
    return PrefixStore(f"{prefix}/{number}", store), rank, len(ranks)


def gloo_from_process_group(group: Any = None, timeout: float = DEFAULT_TIMEOUT_S) -> GlooTransport:
    """A ``GlooTransport`` between the ranks of ``group``; raises like the above."""
    return _gloo(*store_from_process_group(group, timeout), timeout)


def store_from_mpi(comm: Any, timeout: float = DEFAULT_TIMEOUT_S) -> tuple[Any, int, int]:
    """(store, rank, world_size) for the ranks of ``comm``, an mpi4py communicator; all of them must call.

    The process of rank 0 hosts the store, on a port that the system chose, until it ends. Every call returns a store
    under a new prefix. Only ``Get_rank``, ``Get_size``, ``bcast`` and ``allgather`` are called, on this thread.

    Raises:
        TypeError: ``comm`` is no communicator.
        TransportError: on every rank, if rank 0 cannot host the store or a rank cannot reach it within ``timeout``
            seconds.
    """
    missing = [name for name in ("Get_rank", "Get_size", "bcast", "allgather") if not hasattr(comm, name)]
    if missing:
        wanted = "an mpi4py communicator, like mpi4py.MPI.COMM_WORLD"
        raise TypeError(f"{type(comm).__name__} is not {wanted}: it has no {', '.join(missing)}")
    rank, world_size = comm.Get_rank(), comm.Get_size()
    hosts = comm.allgather(socket.gethostname())
    offer = _host_mpi_store(hosts) if rank == 0 else None
    host, port, number, error = comm.bcast(offer, root=0)
    if error:
        raise TransportError(f"rank {rank} of {world_size}: rank 0 cannot host a store on {hosts[0]}: {error}")
    store: Any = None
    try:
        store = _bounded(lambda: TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout)), rank, timeout)
    except (RuntimeError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    errors = {each: text for each, text in enumerate(comm.allgather(error)) if text}
    if errors:
        who = f"{name_ranks(list(errors))} did not reach the store at {host}:{port} within {timeout:g} s"
        raise TransportError(f"rank {rank} of {world_size}: {who}: {next(iter(errors.values()))}")
    return PrefixStore(f"microddp/mpi/{number}", store), rank, world_size


def gloo_from_mpi(comm: Any, timeout: float = DEFAULT_TIMEOUT_S) -> GlooTransport:
    """A ``GlooTransport`` between the ranks of an mpi4py communicator; raises like the above."""
    return _gloo(*store_from_mpi(comm, timeout), timeout)


def _gloo(store: Any, rank: int, world_size: int, timeout: float) -> GlooTransport:
    address = None if os.environ.get("GLOO_SOCKET_IFNAME") else local_address(store)
    return GlooTransport(store, rank, world_size, timeout=timeout, address=address)


def _host_mpi_store(hosts: list[str]) -> tuple[str, int, int, str]:
    """(host, port, number of the call, error) of the store on this host, the first of ``hosts``."""
    try:
        with _lock:
            server = _mpi_servers.get(os.getpid())
            if server is None:
                server = TCPStore(LOOPBACK, 0, None, True, wait_for_workers=False)  # it listens everywhere
                _mpi_servers[os.getpid()] = server
            return _host_towards(hosts), server.port, next(_mpi_numbers), ""
    except Exception as error:  # the other ranks wait to hear of it
        return "", 0, 0, f"{type(error).__name__}: {error}"


def _host_towards(hosts: list[str]) -> str:
    """The name or address by which ``hosts`` reach the first of them."""
    others = sorted({*hosts} - {hosts[0]})
    if not others:
        return LOOPBACK
    addresses = (address_towards(other) for other in others)
    return next((each for each in addresses if each is not None and not is_loopback(each)), hosts[0])


def _bounded(connect: Callable[[], Any], rank: int, timeout: float) -> Any:
    """What ``connect`` returns: torch's timeout is for a host that does not listen, not for one that is stopped."""
    deadline = time.monotonic() + timeout + CONNECT_GRACE_S
    return run_bounded(connect, deadline, f"rank {rank}, connecting to the store, whose host may be stopped")


def _connect(place: _Place, timeout: float) -> Any:
    try:
        found = rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=timeout))
        return _bounded(lambda: next(iter(found))[0], place.rank, timeout)
    except (RuntimeError, OSError) as error:
        address = f"{place.host}:{place.port} (MASTER_ADDR:MASTER_PORT)"
        who = f"rank {place.rank} of {place.world_size}"
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise TransportError(f"{who} cannot listen on {address}: the port is already in use") from error
        raise TransportError(f"{who} did not reach the store at {address} within {timeout:g} s: {error}") from error


def _read_environment() -> _Place:
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        given = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)) or "none of them"
        raise ValueError(
            f"{', '.join(missing)} must be set (found {given}): start the ranks with torchrun, or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    world_size = _integer("WORLD_SIZE", 1, None)
    rank = _integer("RANK", 0, world_size - 1)
    return _Place(rank, world_size, os.environ["MASTER_ADDR"], _integer("MASTER_PORT", 0, 65535))


def _integer(name: str, low: int, high: int | None) -> int:
    text = os.environ[name]
    wanted = f"an integer from {low} on" if high is None else f"an integer in {low}..{high}"
    if name == "RANK":
        wanted += f" (WORLD_SIZE={os.environ['WORLD_SIZE']})"
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be {wanted}") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={text!r} must be {wanted}")
    return value


def _local_address() -> str | None:
    """The address that Gloo should listen on; None: leave it to torch.

    Torch takes the address that this host's name resolves to, if it does. Where the store is on this host's
    loopback all ranks are here, and a name that does not resolve, or resolves to another interface, cannot matter.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    host = os.environ["MASTER_ADDR"]
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if "127.0.0.1" in addresses:
        return "127.0.0.1"
    return "::1" if "::1" in addresses else None

"""How ranks that were started by something else (torchrun, a batch system, by hand) find each other.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have torchrun's meaning. No global process group is made, and one may
be made before or after.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from microddp.errors import TransportError
from microddp.transport.gloo import GlooTransport

__all__ = ["gloo_from_environment", "store_from_environment"]

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


def _connect(place: _Place, timeout: float) -> Any:
    try:
        found = rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=timeout))
        return next(iter(found))[0]
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

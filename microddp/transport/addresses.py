"""By which address other ranks reach this host."""

from __future__ import annotations

import os
import socket
from typing import Any, Final

__all__ = ["LOOPBACK", "address_towards", "is_loopback", "local_address", "store_host"]

LOOPBACK: Final = "127.0.0.1"

_ANYWHERE: Final = ("", "0.0.0.0", "::")  # where a server listens, not where one reaches it
_ANY_PORT: Final = 9  # nothing is sent there


def local_address(store: Any) -> str:
    """The address of this host by which it reaches the host of ``store``, for other ranks to reach it.

    A store that does not know its host: that of MASTER_ADDR, else the address of this host's own name, else loopback.
    """
    for host in (store_host(store), os.environ.get("MASTER_ADDR"), socket.gethostname()):
        if host and (address := address_towards(host)) is not None:
            return address
    return LOOPBACK


def store_host(store: Any) -> str | None:
    """The host that a torch.distributed store connects to, through any prefixes; None if it has none."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host not in _ANYWHERE else None


def address_towards(host: str) -> str | None:
    """The local address of a connection to ``host``, IPv4 first; None if there is no way there."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # of a datagram socket: chooses the way and sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def is_loopback(address: str) -> bool:
    """Whether only this host can reach ``address``, an IP address."""
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1")

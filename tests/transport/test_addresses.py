"""Which address other ranks are told."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.transport import addresses
from microddp.transport.addresses import address_towards, is_loopback, local_address, store_host

pytestmark = pytest.mark.timeout(30)

HOST = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # nobody's, by RFC 5737


def test_the_store_knows_its_host_through_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore("outer", PrefixStore("inner", TCPStore(HOST, 0, None, True, wait_for_workers=False)))
    monkeypatch.setenv("MASTER_ADDR", ELSEWHERE)
    assert store_host(store) == HOST
    assert local_address(store) == HOST


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_server_that_listens_everywhere_is_nowhere(host: str) -> None:
    class Server:
        def __init__(self) -> None:
            self.host = host

    assert store_host(Server()) is None


def test_without_a_host_the_variable_counts_then_the_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_host(HashStore()) is None
    monkeypatch.setattr(socket, "gethostname", lambda: "own name")
    known = {"master": "10.0.0.1", "own name": "10.0.0.2"}
    monkeypatch.setattr(addresses, "address_towards", known.get)
    monkeypatch.setenv("MASTER_ADDR", "master")
    assert local_address(HashStore()) == "10.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "unknown")
    assert local_address(HashStore()) == "10.0.0.2"
    monkeypatch.delenv("MASTER_ADDR")
    assert local_address(HashStore()) == "10.0.0.2"
    known.clear()
    assert local_address(HashStore()) == HOST


def test_an_unknown_name_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    assert address_towards("no.such.host.invalid") is None


def _unknown(*_: object, **__: object) -> None:
    raise socket.gaierror("unknown name")


def test_ipv4_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = socket.SOCK_DGRAM
    found = [(socket.AF_INET6, kind, 17, "", ("::1", 9, 0, 0)), (socket.AF_INET, kind, 17, "", (HOST, 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert address_towards("both") == HOST


@pytest.mark.parametrize(
    ("address", "expected"), [(HOST, True), ("127.0.1.1", True), ("::1", True), (ELSEWHERE, False)]
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected

"""What every host transport must do, as cases that one rank runs with its ``Transport``.

A runner builds a world, calls ``fn(transport)`` on every rank at once and reports what any rank raised. All cases
leave the world usable, so that one world may run them in a row on any number of ranks. Messages are told apart by
their bytes, which a formula of (sender, receiver, salt) gives on both ends. Cases that break their world are in
``contract_failures``.
"""

from __future__ import annotations

import itertools

import torch

from microddp.transport.base import Kind, Transfer, Transport
from tests.transport.contract_tools import (
    DTYPES,
    Case,
    exchange,
    message,
    neighbours,
    poison,
    recv,
    same_bytes,
    send,
)

__all__ = ["contract_cases"]


def _peers(transport: Transport) -> list[int]:
    return [peer for peer in range(transport.world_size) if peer != transport.rank]


def _shift(
    transport: Transport, numel: int, dtype: torch.dtype = torch.float32, *, salt: int = 0, wait: bool = True
) -> None:
    """Every rank sends one message to the next rank, overwrites it when it may and checks what came."""
    if transport.world_size == 1:
        return
    left, right = neighbours(transport)
    outgoing, incoming = message(transport.rank, right, salt, numel, dtype), poison(numel, dtype)
    with exchange(transport) as opened:
        events = opened.post([send(right, outgoing), recv(left, incoming)])
        assert len(events) == 2, "one event for each transfer"
        if wait:
            opened.wait(events)
            outgoing.copy_(poison(numel, dtype))
    outgoing.copy_(poison(numel, dtype))
    assert same_bytes(incoming, message(left, transport.rank, salt, numel, dtype)), f"{dtype} x {numel}"


def _ping(transport: Transport) -> None:
    """One small message each way round; the waits follow one by one."""
    left, right = neighbours(transport)
    if left == transport.rank:
        return
    incoming = poison(3)
    with exchange(transport) as opened:
        (sent,) = opened.post([send(right, message(transport.rank, right, 1, 3))])
        (received,) = opened.post([recv(left, incoming)])
        opened.wait([])
        opened.wait([received])
        assert same_bytes(incoming, message(left, transport.rank, 1, 3))
        opened.wait([sent])
        opened.wait([sent, received])


def _ring_of_five_steps(transport: Transport) -> None:
    """A token is forwarded five times: after step s it is the one of the rank s + 1 places to the left."""
    left, right = neighbours(transport)
    if left == transport.rank:
        return
    slots = [torch.full((5,), float(transport.rank)), poison(5)]
    before = transport.counters.steps
    with exchange(transport) as opened:
        for step in range(5):
            source, target = slots[step % 2], slots[(step + 1) % 2]
            opened.wait(opened.post([send(right, source, step), recv(left, target, step)]))
            assert target.tolist() == [float((transport.rank - step - 1) % transport.world_size)] * 5
    assert transport.counters.steps == before + 5


def _many_in_flight(transport: Transport) -> None:
    """Three messages of different sizes to and from every peer in one group, awaited in reverse."""
    rank, sizes = transport.rank, (1, 5, 900)
    keys = [(peer, salt) for peer in _peers(transport) for salt in range(3)]
    buffers = {key: poison(sizes[key[1]]) for key in keys}
    sends = [send(peer, message(rank, peer, salt, sizes[salt])) for peer, salt in keys]
    receives = [recv(peer, buffers[peer, salt]) for peer, salt in keys]
    with exchange(transport) as opened:
        for event in reversed(opened.post(receives + sends)):
            opened.wait([event])
    for (peer, salt), buffer in buffers.items():
        assert same_bytes(buffer, message(peer, rank, salt, sizes[salt])), (peer, salt)


def _posting_order(transport: Transport) -> None:
    """Messages alike in size on one edge match in posting order, within a group and over several posts."""
    left, right = neighbours(transport)
    if left == transport.rank:
        return
    buffers = [poison(4) for _ in range(8)]
    with exchange(transport) as opened:
        outgoing = [send(right, message(transport.rank, right, salt, 4)) for salt in range(8)]
        events = [*opened.post(outgoing[:2])]
        events += [event for each in outgoing[2:6] for event in opened.post([each])]
        events += opened.post([recv(left, buffer) for buffer in buffers[:5]])
        events += opened.post([*outgoing[6:], *(recv(left, buffer) for buffer in buffers[5:])])
        opened.wait(events)
    for salt, buffer in enumerate(buffers):
        assert same_bytes(buffer, message(left, transport.rank, salt, 4)), f"message {salt}"


def _every_dtype(transport: Transport) -> None:
    for salt, dtype in enumerate(DTYPES):
        _shift(transport, 37, dtype, salt=salt)


def _sizes(transport: Transport) -> None:
    for numel in (1, 2, 17, 1 << 18):
        _shift(transport, numel)
    _shift(transport, 1, torch.uint8)


def _sender_overwrites_after_wait(transport: Transport) -> None:
    """In pairs: the reader posts after its "go" has arrived, with the send pending: that must not end early."""
    rank, peer = transport.rank, transport.rank ^ 1
    for salt, numel in itertools.product(range(6), (4, 1 << 16)):
        is_sender = (rank + salt) % 2 == 0
        buffer = message(rank, peer, salt, numel) if is_sender else poison(numel)
        with exchange(transport) as opened:
            if peer >= transport.world_size:  # the last of an odd number of ranks only meets the others
                pass
            elif is_sender:
                sent = opened.post([send(peer, buffer)])
                opened.wait(opened.post([recv(peer, poison(1))]))
                opened.wait(sent)
                buffer.fill_(-1.0)
            else:
                opened.wait(opened.post([send(peer, poison(1))]))
                opened.wait(opened.post([recv(peer, buffer)]))
        unread = is_sender or peer >= transport.world_size
        assert unread or same_bytes(buffer, message(peer, rank, salt, numel)), f"round {salt}, {numel} elements"


def _finish_waits(transport: Transport) -> None:
    """``finish`` alone completes everything posted."""
    for numel in (1, 1 << 18):
        _shift(transport, numel, wait=False)


def _counters(transport: Transport) -> None:
    """Rank 0 gets one message from each rank and answers with a longer one: counted as posted, exactly."""
    rank, num_peers = transport.rank, transport.world_size - 1
    peers = _peers(transport) if rank == 0 else [0]
    transport.counters.reset()
    with exchange(transport) as opened:
        up = [recv(peer, poison(3)) if rank == 0 else send(peer, poison(3)) for peer in peers]
        opened.wait(opened.post(up))
        down = [send(p, poison(5), 2) if rank == 0 else recv(p, poison(5), 2) for p in peers]
        opened.wait(opened.post(down))
    counters = transport.counters
    short, long, messages = (12 * num_peers, 20 * num_peers, num_peers) if rank == 0 else (12, 20, 1)
    sent, received = (long, short) if rank == 0 else (short, long)
    assert (counters.bytes_sent, counters.bytes_received) == (sent, received)
    assert (counters.messages_sent, counters.messages_received) == (messages, messages)
    assert (counters.steps, counters.collectives) == (2 if num_peers else 0, 1)


def _empty_collectives(transport: Transport) -> None:
    """Collectives of no elements pass, also when only two ranks move data."""
    before = transport.counters.collectives
    for _ in range(3):
        with exchange(transport):
            pass
    buffer = poison(2)
    with exchange(transport) as opened:
        assert list(opened.post([])) == []
        if transport.world_size > 1 and transport.rank == 0:
            opened.post([send(1, message(0, 1, 5, 2))])
        elif transport.rank == 1:
            opened.post([recv(0, buffer)])
    assert transport.rank != 1 or same_bytes(buffer, message(0, 1, 5, 2))
    assert transport.counters.collectives == before + 4


def _many_in_a_row(transport: Transport) -> None:
    """No message of one collective reaches another, though ranks run ahead of each other."""
    for salt in range(60):
        _shift(transport, (1, 5, 9)[salt % 3], salt=salt)


def _views_with_offset(transport: Transport) -> None:
    """Slices of larger tensors: what lies beside them is neither sent nor written."""
    left, right = neighbours(transport)
    if left == transport.rank:
        return
    source, target = poison(64), poison(64)
    source[5:18] = message(transport.rank, right, 9, 13)
    with exchange(transport) as opened:
        opened.wait(opened.post([send(right, source[5:18]), recv(left, target[31:44])]))
    assert same_bytes(target[31:44], message(left, transport.rank, 9, 13))
    assert same_bytes(target[:31], poison(31)) and same_bytes(target[44:], poison(20))


def _forwarding(transport: Transport) -> None:
    """What arrived is forwarded as soon as it is known to be complete."""
    left, right = neighbours(transport)
    if left == transport.rank:
        return
    first, second = poison(6), poison(6)
    with exchange(transport) as opened:
        events = opened.post([send(right, message(transport.rank, right, 2, 6)), recv(left, first)])
        opened.wait(events)
        opened.wait(opened.post([send(right, first, 1), recv(left, second, 1)]))
    origin = (left - 1) % transport.world_size
    assert same_bytes(second, message(origin, left, 2, 6))


def _fused_combine(transport: Transport) -> None:
    """Where the transport can, ``combine`` is called once with the peer's values; the sum may alias its view."""
    left, right = neighbours(transport)
    if not transport.fuses_combine or left == transport.rank:
        return
    outgoing, total = torch.full((9,), 10.0**transport.rank), torch.full((9,), 0.5)
    calls: list[int] = []

    def combine(operand: torch.Tensor) -> None:
        calls.append(operand.numel())
        total.add_(operand)

    with exchange(transport) as opened:
        group = [Transfer(Kind.RECV_COMBINE, left, 0, total, combine), send(right, outgoing)]
        opened.wait(opened.post(group))
    assert calls == [9]
    assert total.tolist() == [0.5 + 10.0**left] * 9


def contract_cases() -> list[tuple[str, Case]]:
    """(name, fn) of each case; the same world may run them one after another, on every number of ranks."""
    return [
        ("ping", _ping),
        ("ring_of_five_steps", _ring_of_five_steps),
        ("many_in_flight", _many_in_flight),
        ("posting_order", _posting_order),
        ("every_dtype", _every_dtype),
        ("sizes", _sizes),
        ("sender_overwrites_after_wait", _sender_overwrites_after_wait),
        ("finish_waits", _finish_waits),
        ("counters", _counters),
        ("empty_collectives", _empty_collectives),
        ("many_in_a_row", _many_in_a_row),
        ("views_with_offset", _views_with_offset),
        ("after_events", _forwarding),
        ("fused_combine", _fused_combine),
    ]

"""What ranks do that die or leave at once; importable by the processes that do it."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

from microddp.errors import MicroddpError
from microddp.transport.gloo import GlooTransport
from tests.transport.contract_tools import make_header, neighbours, recv, send

Report = tuple[str, str, float]


def die(how: str) -> None:
    """Ends or stops this process on the spot."""
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def ring(
    transport: GlooTransport, _: Connection, numel: int, victim: int, how: str, at_step: int, deadline_s: float
) -> Report:
    """Passes ``numel`` float32 around the ring, ``victim`` dies ``how`` in step ``at_step`` (-1: before the call).

    Returns the error's type and text and the seconds since the call.
    """
    left, right = neighbours(transport)
    header = make_header(1, numel=numel)
    transport.open(make_header(0, numel=0), time.monotonic() + 20).finish()  # all are here
    started = time.monotonic()
    if transport.rank == victim and at_step < 0:
        die(how)
    buffers = [torch.ones(numel), torch.zeros(numel)]
    try:
        opened = transport.open(header, started + deadline_s)
        for step in range(6):
            source, target = buffers[step % 2], buffers[1 - step % 2]
            events = opened.post([send(right, source, step), recv(left, target, step)])
            if transport.rank == victim and step == at_step:
                die(how)
            opened.wait(events)
        opened.finish()
    except MicroddpError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def all_reduce_and_leave(transport: GlooTransport, connection: Connection, numel: int, how: str) -> float:
    """Sums a value over the ring, reports the sum and leaves on the spot, in one of several ways."""
    left, right = neighbours(transport)
    total = torch.full((numel,), 10.0**transport.rank)
    travelling, arriving = total.clone(), torch.zeros(numel)
    opened = transport.open(make_header(0, numel=numel), time.monotonic() + 20)
    for step in range(transport.world_size - 1):
        opened.wait(opened.post([send(right, travelling, step), recv(left, arriving, step)]))
        total += arriving
        travelling, arriving = arriving, travelling
    opened.finish()
    assert bool((total == total[0]).all())
    connection.send(total[0].item())
    if how == "_exit":
        os._exit(0)
    if how == "close":
        transport.close()
        os._exit(0)
    sys.exit(0)


def leave_at_once(transport: GlooTransport, _: Connection) -> int:
    """Leaves as soon as it is connected itself."""
    return transport.rank

"""What the launcher's tests run in other processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from microddp.transport.gloo import GlooTransport
from tests.transport.contract_tools import exchange, neighbours, poison, recv, send


class Awkward(Exception):
    """Cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def describe(transport: GlooTransport, word: str) -> dict[str, Any]:
    """What a rank finds around it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "MARK")
    found = {name: os.environ.get(name) for name in names}
    return {**found, "rank": transport.rank, "word": word, "pid": os.getpid(), "threads": torch.get_num_threads()}


def tensors(transport: GlooTransport, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Changes its own copy of ``given`` and returns a view of it."""
    given += transport.rank
    return {"view": given[1:], "half": torch.full((2, 2), transport.rank, dtype=torch.bfloat16)}


def returned(transport: GlooTransport, given: Any) -> Any:
    """What it got."""
    return given


def torchs_own_group(transport: GlooTransport) -> float:
    """The default process group, by the variables that the ranks are given."""
    dist.init_process_group("gloo")
    total = torch.full((1,), 10.0**transport.rank)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def fail(transport: GlooTransport, how: str, folder: str) -> object:
    """Rank 1 fails ``how``; the others wait for it in a collective, or for ever if ``how`` says so."""
    Path(folder, str(transport.rank)).write_text(str(os.getpid()))
    with exchange(transport) as opened:  # all have come
        left, right = neighbours(transport)
        opened.post([send(right, poison(1)), recv(left, poison(1))])
    if transport.rank == 1:
        return misbehave(how)
    if how.endswith("others busy"):
        threading.Event().wait()
    with exchange(transport) as opened:
        opened.post([recv(1, poison(1))])
    return None


def misbehave(how: str) -> object:
    """Does what ``how`` says."""
    if how.startswith("raise"):
        raise KeyError("no such thing")
    if how == "awkward":
        raise Awkward("this", "that")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lambda":
        return lambda: None
    assert how == "sleep"
    time.sleep(1000)
    return None

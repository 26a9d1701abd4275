"""Ranks that hold a lifeline and nothing else, as processes that do what the test says and report what they hear."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from microddp.transport.lifeline import Lifeline
from microddp.transport.noticeboard import Failure

HOST = "127.0.0.1"
LIMIT_S = 20.0


@dataclass
class Rank:
    """The test's end of one rank's process: ``heard`` are its reports, (name, argument, when)."""

    process: BaseProcess
    connection: Connection
    heard: list[tuple[str, Any, float]] = field(default_factory=list)

    def tell(self, command: str, *args: Any) -> None:
        self.connection.send((command, *args))

    def kill(self) -> float:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        return time.monotonic()

    def wait_for(self, name: str) -> tuple[Any, float]:
        """The argument and the time of the first report of that name."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for each, argument, when in self.heard:
                if each == name:
                    return argument, when
            assert self.connection.poll(deadline - time.monotonic()), f"no {name!r} after {self.heard}"
            self.heard.append(self.connection.recv())

    def leave(self) -> list[tuple[str, Any, float]]:
        """Has the rank close its lifeline and exit; returns all that it has heard."""
        self.tell("leave")
        self.wait_for("left")
        self.process.join(LIMIT_S)
        assert self.process.exitcode == 0
        return [each for each in self.heard if each[0] in ("failure", "farewell")]


@contextmanager
def lifeline_ranks(world_size: int, folder: Path) -> Iterator[list[Rank]]:
    """``world_size`` connected ranks whose store is gone; whatever the test leaves of them is killed."""
    path = folder / "store"
    context = multiprocessing.get_context("forkserver")
    ranks: list[Rank] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, world_size, str(path), theirs))
            process.start()
            theirs.close()
            ranks.append(Rank(process, ours))
        for each in ranks:
            each.wait_for("ready")
        path.unlink()
        yield ranks
    finally:
        for each in ranks:
            each.process.kill()
            each.process.join()
            each.connection.close()


def _main(rank: int, world_size: int, path: str, connection: Connection) -> None:
    store = FileStore(path, world_size)
    lock = threading.Lock()

    def report(name: str, argument: Any = None) -> None:
        with lock:
            connection.send((name, argument, time.monotonic()))

    lifeline = Lifeline(
        PrefixStore("lifelines", store),
        rank,
        world_size,
        timeout=LIMIT_S,
        on_failure=lambda failure: report("failure", failure),
        on_farewell=lambda departed: report("farewell", departed),
        address=HOST,
    )
    report("ready")
    while True:
        command, *args = connection.recv()
        if command == "publish and die":
            lifeline.publish(Failure(*args))
            os._exit(5)
        if command == "fork":
            report("forked", _fork(lifeline, connection))
        if command == "leave":
            lifeline.close()
            report("left")
            return


def _fork(lifeline: Lifeline, connection: Connection) -> int:
    """The id of a child that lives until the test hangs up; it tries what a child must not be able to do.

    It is forked while another thread, which it does not have, holds the lifeline's lock.
    """
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with lifeline._lock:
            held.set()
            forked.wait(LIMIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        lifeline.publish(Failure("remote", lifeline.rank, "published by a forked child"))
        lifeline.close()
        connection.send(("child", None, time.monotonic()))
        try:
            connection.recv()
        finally:
            os._exit(0)
    forked.set()
    holder.join()
    return child

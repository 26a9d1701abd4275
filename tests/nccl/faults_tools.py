"""Ranks as processes that may end in any way, over the stand-in: forked in milliseconds from one that has CuPy loaded.

A rank is no child of multiprocessing, which would end it by ``os._exit``: it leaves as any program does, through
Python's own shutdown, so that its exit code, what it prints and how long it takes are those of a user's program.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any
from unittest import mock

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.transport.gloo_pool import QUICK_NAMES

__all__ = ["HOST", "LIMIT_S", "QUIET", "Rank", "Zygote", "new_server", "zygote"]

HOST = "127.0.0.1"
LIMIT_S = 30.0  # nothing that a rank does takes so long
QUIET = {"STANDIN_QUIET_DEATH": "1"}
PACKET_NBYTES = 1 << 16


@dataclass
class Rank:
    """The test's end of one rank.

    Attributes:
        heard: what it has reported: (name, value, when), in ``time.monotonic()`` seconds, which are those of all
            processes of a machine.
    """

    rank: int
    pid: int
    connection: Connection
    output: IO[bytes]
    _zygote: Zygote
    heard: list[tuple[str, Any, float]] = field(default_factory=list)

    def tell(self, what: str) -> None:
        self.connection.send(what)

    def __post_init__(self) -> None:
        self._process = os.pidfd_open(self.pid)  # a number may be another process's once this one is gone

    def signal(self, number: signal.Signals) -> float:
        """Sends it a signal, unless it is gone; returns when."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)
        return time.monotonic()

    def close(self) -> None:
        """Kills it, if need be, and lets go of it."""
        self.signal(signal.SIGKILL)
        self.exit()
        os.close(self._process)
        self.connection.close()
        self.output.close()

    def wait_for(self, name: str, limit_s: float = LIMIT_S) -> tuple[Any, float]:
        """The value and the time of its first report of that name."""
        deadline = time.monotonic() + limit_s
        while True:
            for each, value, when in self.heard:
                if each == name:
                    return value, when
            if not self.connection.poll(max(deadline - time.monotonic(), 0.0)):
                raise AssertionError(f"rank {self.rank} has not said {name!r} but {self.heard}\n{self.printed()}")
            try:
                self.heard.append(self.connection.recv())
            except EOFError:
                raise AssertionError(
                    f"rank {self.rank} ended without {name!r}: {self.heard}\n{self.printed()}"
                ) from None

    def exit(self, limit_s: float = LIMIT_S) -> tuple[int, float]:
        """Its exit code, or minus the signal that ended it, and when it was gone."""
        return self._zygote.exit_of(self.pid, limit_s)

    def printed(self) -> str:
        """What it has printed so far."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


class Zygote:
    """The process from which ranks are forked. ``exits``: by process id, the exit code and when it was seen."""

    def __init__(self, **env: str) -> None:
        self.exits: dict[int, tuple[int, float]] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "error::ResourceWarning", "-m", __name__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, **QUICK_NAMES, **env}, stdin=subprocess.DEVNULL
            )

    def close(self) -> None:
        """Ends it; the ranks must have ended before."""
        self._control.close()
        self._process.wait(LIMIT_S)

    @contextmanager
    def ranks(
        self,
        body: Callable[..., object],
        world_size: int,
        *args: Any,
        env: dict[str, str] | None = None,
        hurry: bool = False,
    ) -> Iterator[list[Rank]]:
        """``body(seat, *args)`` in a process for each rank; what the test leaves of them is killed.

        ``body`` is a function of a module; ``args`` are what JSON can carry. ``env`` is added to the environment. In a
        ``hurry``, ranks do not take Python apart after what is registered to be done at exit, which takes time.
        """
        store = new_server()
        ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                seat = {"rank": rank, "world_size": world_size, "port": store.port}
                ranks.append(self._fork(rank, body, seat, args, {**QUIET, **(env or {})}, hurry))
            yield ranks
        finally:
            for each in ranks:
                each.signal(signal.SIGKILL)
            for each in ranks:
                each.close()

    def exit_of(self, pid: int, limit_s: float) -> tuple[int, float]:
        deadline = time.monotonic() + limit_s
        while pid not in self.exits:
            message = self._receive(deadline)
            self.exits[message["pid"]] = (message["code"], message["when"])
        return self.exits[pid]

    def _fork(
        self, rank: int, body: Callable[..., object], seat: dict[str, int], args: Any, env: Any, hurry: bool
    ) -> Rank:
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rank
        request = {
            "module": body.__module__,
            "name": body.__name__,
            "seat": seat,
            "args": args,
            "env": env,
            "hurry": hurry,
        }
        with theirs:
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno(), output.fileno()])
        message = self._receive(time.monotonic() + LIMIT_S, "forked")
        self.exits.pop(message["forked"], None)  # of an earlier process with this number
        return Rank(rank, message["forked"], Connection(ours.detach()), output, self)

    def _receive(self, deadline: float, name: str = "pid") -> Any:
        """The next message with that name; notes the exits that come before."""
        while True:
            if not select.select([self._control], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise AssertionError("a rank has not ended" if name == "pid" else "the zygote does not answer")
            message = json.loads(self._control.recv(PACKET_NBYTES))
            if name in message:
                return message
            self.exits[message["pid"]] = (message["code"], message["when"])


@contextmanager
def zygote() -> Iterator[Zygote]:
    """A zygote, which none of its ranks outlives."""
    with mock.patch.dict("os.environ", QUICK_NAMES):  # for the threads of stores too, which live longer than a call
        made = Zygote()
        try:
            yield made
        finally:
            made.close()


def new_server() -> Any:
    """A store for ranks, in this process."""
    with mock.patch.dict("os.environ", QUICK_NAMES):
        return TCPStore(HOST, 0, None, True, wait_for_workers=False)


def _serve(control: socket.socket) -> Callable[[], object] | None:
    """Forks ranks and tells of their ends until the test hangs up. Returns what a rank has to do, in the rank."""
    children: dict[int, int] = {}
    while True:
        ready: int
        for ready in select.select([control.fileno(), *children], [], [])[0]:
            if ready in children:
                _tell_of_exit(control, children.pop(ready), ready)
                continue
            data, descriptors, _, _ = socket.recv_fds(control, PACKET_NBYTES, 2)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                for each in children:
                    os.close(each)
                return _rank(json.loads(data), descriptors)
            for each in descriptors:
                os.close(each)
            children[os.pidfd_open(pid)] = pid
            control.send(json.dumps({"forked": pid}).encode())


def _tell_of_exit(control: socket.socket, pid: int, descriptor: int) -> None:
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    message = {"pid": pid, "code": os.waitstatus_to_exitcode(status), "when": time.monotonic()}
    control.send(json.dumps(message).encode())


def _rank(request: dict[str, Any], descriptors: Sequence[int]) -> Callable[[], object]:
    connection, output = descriptors
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.update(request["env"])
    module = importlib.import_module(request["module"])
    seat = module.Seat(**request["seat"], connection=Connection(connection))

    def task() -> None:
        if request["hurry"]:
            atexit.register(_hurry)
        getattr(module, request["name"])(seat, *request["args"])

    return task


def _hurry() -> None:
    """Registered first, so called last: after all else that happens at exit."""
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


def main(descriptor: int) -> None:
    """The zygote, and, in its children, the ranks."""
    import torch

    from tests.nccl.build import load_standin

    load_standin()
    importlib.import_module("tests.nccl.faults_cases")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each rank, as it ends, would copy and look through everything that is loaded here
    with socket.socket(fileno=descriptor) as control:
        task = _serve(control)
    if task is not None:
        task()


if __name__ == "__main__":
    main(int(sys.argv[1]))

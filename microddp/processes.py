"""Ranks as processes of this machine: starts them, calls a function on each, and leaves none behind.

The parent hosts the store, on a port that the system chose, so that it outlives every rank and no port is guessed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.errors import CollectiveTimeoutError
from microddp.processes_child import LAUNCH_PREFIX, Died, Raised, Returned, pickle_call, rank_main, unpickle
from microddp.transport.noticeboard import Failure, Noticeboard, name_ranks

__all__ = ["RankProcesses", "run_process_ranks"]

HOST: Final = "127.0.0.1"
SURVIVOR_GRACE_S: Final = 3.0  # for the other ranks to notice a failure and say so themselves
EXIT_GRACE_S: Final = 5.0

_environment_lock = threading.Lock()


def run_process_ranks(
    target: Callable[..., Any],
    world_size: int,
    *,
    args: tuple[Any, ...] = (),
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``target(transport, *args)`` on ``world_size`` new local processes, one for each rank.

    Args:
        target: importable by name from another process; ``transport`` is the rank's ``GlooTransport``.
        args: pickled by value, as are the results: tensors are copied, not shared.
        timeout: seconds for the whole run; None: no limit.
        env: variables for the ranks, beside those that torchrun would set (RANK, WORLD_SIZE, MASTER_ADDR, …).

    Returns:
        What each rank returned, in rank order.

    Raises:
        TypeError: ``target`` or an argument cannot be sent to another process; nothing was started.
        TransportError: a rank was killed or exited before it returned.
        CollectiveTimeoutError: ``timeout`` passed.
        Whatever a rank raised first, with its rank and traceback as the cause.
    """
    call = pickle_call(target, args)
    with RankProcesses(world_size, env=env) as ranks:
        return ranks.run(call, timeout)


class RankProcesses:
    """``world_size`` local processes, connected by one ``GlooTransport``, that call functions until closed.

    After a call that failed they are gone, and every later call is refused.
    """

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None, daemon: bool = False) -> None:
        """Starts the processes and returns at once; they connect while the first call waits.

        Args:
            env: variables for the ranks.
            daemon: they end with this process even if never closed, but cannot have child processes.
        """
        if world_size < 1:
            raise ValueError(f"world size must be at least 1, not {world_size}")
        self.world_size = world_size
        self._store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._broken = ""
        try:
            for rank in range(world_size):
                self._start(rank, env or {}, daemon)
        except BaseException:
            self._end(EXIT_GRACE_S, polite=False)
            raise

    @property
    def broken(self) -> bool:
        """A call has failed, or ``close`` was called: the processes have ended."""
        return bool(self._broken)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid or 0 for process in self._processes]

    def call(self, target: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """``target(transport, *args)`` on every rank; returns and raises like ``run_process_ranks``."""
        return self.run(pickle_call(target, args), timeout)

    def run(self, call: bytes, timeout: float | None) -> list[Any]:
        """``call``, with a call that ``pickle_call`` has pickled."""
        if self._broken:
            raise RuntimeError(f"these processes have ended: {self._broken}")
        try:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it died: noticed below
                    connection.send_bytes(call)
            return self._collect(timeout)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._end(EXIT_GRACE_S, polite=False)
            raise

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._broken = self._broken or "closed"
        self._end(EXIT_GRACE_S, polite=True)

    def kill(self) -> None:
        """Ends the processes at once, whatever they are doing. Idempotent."""
        self._broken = self._broken or "killed"
        self._end(EXIT_GRACE_S, polite=False)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int, env: Mapping[str, str], daemon: bool) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        port = self._store.port
        process = context.Process(
            target=rank_main,
            args=(rank, self.world_size, HOST, port, theirs),
            name=f"microddp-rank-{rank}",
            daemon=daemon,
        )
        with theirs, _environment({**_rank_environment(rank, self.world_size, port), **env}):
            process.start()
        self._processes.append(process)
        self._connections.append(ours)

    def _collect(self, timeout: float | None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        outcomes: dict[int, Returned | Raised | Died] = {}
        failed = False
        while len(outcomes) < self.world_size:
            since = time.monotonic()
            limit = None if deadline is None else max(deadline - since, 0.0)
            outcomes.update(self._poll(outcomes.keys(), limit, since))
            failures = [each for each in outcomes.values() if not isinstance(each, Returned)]
            if failures and not failed:
                failed = True
                self._tell_survivors(failures[0])
                deadline = time.monotonic() + SURVIVOR_GRACE_S
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._results(outcomes, timeout)

    def _poll(self, done: Any, limit: float | None, since: float) -> dict[int, Returned | Raised | Died]:
        """The outcomes of the ranks that have just returned, raised or died, by rank."""
        pending = [rank for rank in range(self.world_size) if rank not in done]
        sources: list[Any] = [self._connections[rank] for rank in pending]
        sources += [self._processes[rank].sentinel for rank in pending]
        ready = wait(sources, limit)
        found: dict[int, Returned | Raised | Died] = {}
        for rank in pending:
            connection, process = self._connections[rank], self._processes[rank]
            if connection not in ready and process.sentinel not in ready:
                continue
            try:
                # What it said before it died counts; the end of the pipe comes after.
                found[rank] = unpickle(connection.recv_bytes())
            except (EOFError, OSError):
                process.join(EXIT_GRACE_S)
                # When it died is not known, only that it lived when the wait began.
                found[rank] = Died(rank, since, _describe_exit(process.exitcode))
        return found

    def _results(self, outcomes: dict[int, Returned | Raised | Died], timeout: float | None) -> list[Any]:
        failures = [each for each in outcomes.values() if not isinstance(each, Returned)]
        if failures:
            causes = [each for each in failures if not (isinstance(each, Raised) and each.is_consequence)]
            min(causes or failures, key=lambda failure: failure.when).throw()
        missing = [rank for rank in range(self.world_size) if rank not in outcomes]
        if missing:
            raise CollectiveTimeoutError(
                f"{name_ranks(missing)} of {self.world_size} had not returned after {timeout:g} s"
            )
        results = (outcomes[rank] for rank in range(self.world_size))
        return [unpickle(each.payload) for each in results if isinstance(each, Returned)]

    def _tell_survivors(self, failure: Raised | Died) -> None:
        """Lets ranks that wait in a collective raise at once, with the reason."""
        with contextlib.suppress(RuntimeError):
            board = Noticeboard(PrefixStore(LAUNCH_PREFIX, self._store), failure.rank, self.world_size)
            board.publish(Failure("remote", failure.rank, failure.describe()))

    def _end(self, grace_s: float, *, polite: bool) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                if polite:
                    connection.send_bytes(b"")
        deadline = time.monotonic() + (grace_s if polite else 0.0)
        for stop in (None, BaseProcess.terminate, BaseProcess.kill):
            for process in self._processes:
                if stop is not None and process.exitcode is None:
                    stop(process)
            for process in self._processes:
                process.join(max(deadline - time.monotonic(), 0.0))
            deadline = time.monotonic() + (1.0 if stop is None else grace_s)
        for connection in self._connections:
            connection.close()
        self._connections = []


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set, so that ``init_process_group`` works in the ranks too."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not host the store
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Changes this process's environment while a child is started: some variables are read while it imports."""
    with _environment_lock:
        saved = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

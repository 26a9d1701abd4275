"""The calls of one communicator: numbered, in order, in the foreground or behind each other in the background."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

import torch

from microddp.collectives import Job
from microddp.errors import ClosedError, MicroddpError
from microddp.planner import Choice
from microddp.stream_engine import StreamEngine
from microddp.stream_work import GraphedCollective, StreamWork
from microddp.transport.base import Transport
from microddp.transport.stream import NotCapturableError, StreamTransport
from microddp.work import Work, Worker

__all__ = ["Calls"]

CLOSE_GRACE_S: Final = 2.0
"""How long closing waits for works that nobody waited for, and for the background thread to end."""


class Calls:
    """Runs jobs one at a time. Holds no reference to the communicator, so that it can outlive it and close.

    Every call takes one sequence number when it is made, refused ones included, so that the ranks' numbers agree.

    Attributes:
        timeout: seconds that one collective may take.
        last_choice: what the last job ran with.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.timeout = timeout
        self.last_choice: Choice | None = None
        self._transport = transport
        self._who = f"rank {transport.rank} of {transport.world_size}"
        self._worker = Worker(f"microddp-worker-{transport.rank}")
        self._lock = threading.Lock()
        self._sequence = 0
        self._refusal: str | None = None
        self._is_closed = False
        self._capture_stream: Any = None  # one for all captures: torch has 32 in all
        self._graphs: weakref.WeakSet[GraphedCollective[Any]] = weakref.WeakSet()

    @property
    def is_usable(self) -> bool:
        """Whether nothing has failed and nobody has closed it."""
        return self._refusal is None

    def run(self, name: str, check: Callable[[], Job], async_op: bool) -> Any:
        """Checks the arguments, then runs the job after all earlier ones; or, asynchronously, returns its ``Work``.

        Raises:
            ClosedError: closed, or broken by an earlier failure.
            Exception: what ``check`` raises, told to all ranks; with ``async_op`` too. Or what stopped the job.
        """
        with self._lock:
            sequence = self._next(name)
            job = self._checked(name, check, sequence)
            what = f"{self._who}, {name}"
            if isinstance(job.prepared.engine, StreamEngine):
                return self._enqueue(name, job, sequence, async_op)
            if async_op:
                work = Work(lambda: self._execute(name, job, sequence), what)
                self._worker.submit(work)
                return work
            if not self._worker.is_idle:
                self._worker.drain()
            return self._execute(name, job, sequence)

    def capture(self, name: str, check: Callable[[], Job]) -> GraphedCollective[Any]:
        """Captures a job into a graph. It must have run before: ranks connect, and kernels are compiled, when it does.

        Raises:
            ValueError: the transport is not ordered by streams.
            Exception: what ``run`` raises.
        """
        transport = self._transport
        if not isinstance(transport, StreamTransport):
            raise ValueError(f"{self._who}, {name}: the {transport.name} transport has no graphs to capture into")
        runtime = transport.runtime
        kept: list[object] = []
        with self._turn(name) as (sequence, _), runtime.guard():
            job = self._checked(name, check, sequence)
            array, job.array = job.array, None  # within the capture its stream counts, whatever the array is
            self._capture_stream = self._capture_stream or runtime.new_stream()
            before = replace(transport.counters)
            try:
                graph = runtime.capture(
                    self._capture_stream, lambda: self._enqueue(name, job, sequence, False, kept.append)
                )
            finally:
                moves = transport.counters.rewind(before)  # nothing was moved yet
        kept.append(job)
        made: GraphedCollective[Any] = GraphedCollective(
            transport, graph, job.prepared, array, job.result, kept, moves, partial(self._turn, name)
        )
        self._graphs.add(made)
        return made

    def synchronize(self, timeout: float | None) -> None:
        """Blocks until everything called so far has ended; raises what made it fail."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self._worker.drain(timeout):
            raise TimeoutError(f"{self._who}: collectives are still running after {timeout} s; they go on")
        self._transport.synchronize(None if until is None else max(until - time.monotonic(), 0.0))

    def abort(self, error: BaseException) -> None:
        """Makes this rank's and all others' pending and later calls raise, naming ``error``."""
        self._break(f"it was aborted: {type(error).__name__}: {error}")
        self._transport.abort(error)

    def close(self) -> None:
        """Finishes pending works if they end within the grace, else aborts them. Idempotent, from any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self._break("it was closed", final=True)
        deadline = time.monotonic() + CLOSE_GRACE_S
        is_mine = self._lock.acquire(timeout=CLOSE_GRACE_S)
        try:
            if not is_mine or not self._drain(max(deadline - time.monotonic(), 0.0)):
                self._transport.abort(ClosedError(f"{self._who} closed its communicator with a collective pending"))
            for graph in list(self._graphs):
                graph.close()  # before the communicator whose transfers it holds
            self._transport.close()
            self._worker.stop(CLOSE_GRACE_S)
        finally:
            if is_mine:
                self._lock.release()

    def _drain(self, timeout: float) -> bool:
        """Whether everything has ended, well or not, within ``timeout`` seconds."""
        try:
            self.synchronize(timeout)
        except TimeoutError as error:
            return isinstance(error, MicroddpError)  # a collective that has timed out has ended
        except MicroddpError:
            return True
        return True

    def _execute(self, name: str, job: Job, sequence: int) -> Any:
        """One collective, on the thread whose turn it is."""
        if self._refusal is not None and not self._is_closed:
            raise ClosedError(f"{self._who}, {name}: the communicator cannot be used: {self._refusal}")
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is made here is used by later calls, and by other threads
                return self._execute(name, job, sequence)
        prepared = job.prepared
        self.last_choice = prepared.choice
        deadline = time.monotonic() + self.timeout
        is_loaded = False
        try:
            data = job.load()
            is_loaded = True
            header = prepared.header_of(sequence)
            prepared.engine.run(
                prepared.plan, data, prepared.op, header, deadline, types=prepared.types, owner=job.owner
            )
            job.store(data)
        except BaseException as error:
            self._break(f"{name} failed: {type(error).__name__}: {_headline(error)}")
            if not is_loaded:  # the engine tells the other ranks of its own failures
                self._transport.abort(error)
            _add_context(error, f"{self._who}, {name} ({_describe(job)})")
            raise
        return job.result

    @contextmanager
    def _turn(self, name: str) -> Iterator[tuple[int, float]]:
        """A collective of its own, in its turn: its number and deadline. What is raised within breaks all ranks."""
        with self._lock:
            sequence = self._next(name)
            try:
                yield sequence, time.monotonic() + self.timeout
            except NotCapturableError:
                raise
            except MicroddpError as error:
                self._break(f"{name} failed: {type(error).__name__}: {_headline(error)}")
                self._transport.abort(error)
                raise

    def _next(self, name: str) -> int:
        self._check_usable(name)
        self._sequence += 1
        return self._sequence - 1

    def _checked(self, name: str, check: Callable[[], Job], sequence: int) -> Job:
        try:
            return check()
        except BaseException as error:
            self._refuse(name, sequence, error)

    def _enqueue(
        self, name: str, job: Job, sequence: int, async_op: bool, keep: Callable[[object], None] | None = None
    ) -> Any:
        """One collective on a stream-ordered transport: enqueued on the caller's thread, awaited or not."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._enqueue(name, job, sequence, async_op, keep)
        prepared, engine = job.prepared, job.prepared.engine
        assert isinstance(engine, StreamEngine)
        runtime = engine.transport.runtime
        self.last_choice = prepared.choice
        deadline = time.monotonic() + self.timeout
        is_loaded = False
        try:
            if name == "barrier":
                engine.barrier(prepared.header_of(sequence), deadline)
                return None
            with runtime.guard(), runtime.on(runtime.caller_stream(job.array)):
                data = job.load()
                is_loaded = True
                enqueued = engine.run(
                    prepared.plan,
                    data,
                    prepared.op,
                    prepared.header_of(sequence),
                    deadline,
                    types=prepared.types,
                    owner=job.owner,
                    store=partial(job.store, data),
                    array=job.array,
                    keep=keep,
                )
                if not async_op:
                    enqueued.join(job.array)
        except NotCapturableError as error:
            self._refuse(name, sequence, error)
        except BaseException as error:
            self._break(f"{name} failed: {type(error).__name__}: {_headline(error)}")
            if not is_loaded:
                self._transport.abort(error)
            _add_context(error, f"{self._who}, {name} ({_describe(job)})")
            raise
        return StreamWork(enqueued, job.array, job.result, f"{self._who}, {name}") if async_op else job.result

    def _refuse(self, name: str, sequence: int, error: BaseException) -> NoReturn:
        """Tells the other ranks of a refused call, in its turn, and raises."""
        if isinstance(error, (ValueError, TypeError)) and len(error.args) == 1:
            error.args = (f"{self._who}, {name}: {error.args[0]}",)
        if self._worker.is_idle:
            self._transport.reject(sequence, error)
        else:
            self._worker.submit(Work(lambda: self._transport.reject(sequence, error), f"{self._who}, refused {name}"))
        raise error

    def _check_usable(self, name: str) -> None:
        if self._refusal is not None:
            raise ClosedError(f"{self._who}, {name}: the communicator cannot be used: {self._refusal}")

    def _break(self, reason: str, *, final: bool = False) -> None:
        if self._refusal is None:
            self._refusal = reason
        elif final:
            self._refusal = f"{reason}; before that, {self._refusal}"


def _headline(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _describe(job: Job) -> str:
    _, algorithm, op, dtype, shape, root, *_ = job.prepared.header
    return f"algorithm {algorithm}, op {op}, {dtype}{list(shape)}, root {root}"


def _add_context(error: BaseException, context: str) -> None:
    """Adds the call to an error of this library, once, here at the boundary."""
    if isinstance(error, MicroddpError) and len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{context}: {error.args[0]}",)

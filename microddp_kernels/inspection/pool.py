"""Compiles cases in processes of their own, one a core, and yields what they find."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Final

from microddp_kernels.inspection.facts import Case, InspectionError, KernelFacts, KernelFailure

__all__ = ["inspect_cases", "inspect_kernels"]

_CASE_TIMEOUT_S: Final = 300
"""For one case; after that its process is ended."""

_CACHE_VARIABLE: Final = "TRITON_CACHE_DIR"

_Outcome = tuple[int, KernelFacts | KernelFailure] | InspectionError


def inspect_kernels(
    cases: Sequence[Case], *, read_sass: bool = True, num_processes: int | None = None
) -> list[KernelFacts]:
    """Compiles the cases without a GPU and returns what is known of each, in their order.

    Args:
        cases: see ``cases_for``.
        read_sass: read the machine code too, which takes half a second a case and tells spills and instructions.
        num_processes: how many compile at the same time; one a core if None.

    Raises:
        InspectionError: some do not compile; the text says which and why.
    """
    found = dict(inspect_cases(cases, read_sass=read_sass, num_processes=num_processes))
    failures = [each for each in found.values() if isinstance(each, KernelFailure)]
    if failures:
        raise InspectionError("\n\n".join(f"{each.case.text}:\n{each.error}" for each in failures))
    return [each for _, each in sorted(found.items()) if isinstance(each, KernelFacts)]


def inspect_cases(
    cases: Sequence[Case], *, read_sass: bool = True, num_processes: int | None = None
) -> Iterator[tuple[int, KernelFacts | KernelFailure]]:
    """Compiles the cases and yields the index and what is known of each as it is done; see ``inspect_kernels``.

    Raises:
        InspectionError: a process ended, or took longer than five minutes for a case.
    """
    todo: queue.SimpleQueue[tuple[int, Case]] = queue.SimpleQueue()
    for numbered in enumerate(cases):
        todo.put(numbered)
    done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
    count = min(len(cases), num_processes or os.cpu_count() or 1)
    with _environment() as environment, _workers(count, environment) as workers:
        threads = [threading.Thread(target=_serve, args=(each, todo, done, read_sass)) for each in workers]
        try:
            for thread in threads:
                thread.start()
            for _ in cases:
                outcome = done.get()
                if isinstance(outcome, InspectionError):
                    raise outcome
                yield outcome
        finally:
            for worker in workers:
                worker.end()
            for thread in threads:
                thread.join()


class _Worker:
    """A process that compiles, in a session of its own, so that it ends with all that it has started."""

    def __init__(self, environment: dict[str, str], errors: IO[str]) -> None:
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, "-m", "microddp_kernels.inspection.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def ask(self, case: Case, read_sass: bool) -> KernelFacts | KernelFailure | InspectionError:
        """Has it compile a case."""
        timer = threading.Timer(_CASE_TIMEOUT_S, self.end)
        timer.start()
        line = ""
        try:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(json.dumps({"case": asdict(case), "read_sass": read_sass}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:  # it has ended, as the missing answer says
            pass
        finally:
            timer.cancel()
            timer.join()
        if not line.endswith("\n"):
            return InspectionError(
                f"{case.text}: the process that compiles ended or took too long\n{self._last_words()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            return KernelFailure(case, answer["error"])
        facts = answer["facts"]
        return KernelFacts(**{**facts, "case": case, "float_instructions": tuple(facts["float_instructions"])})

    def _last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-2000:].strip()

    def end(self) -> None:
        """Ends it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits for its end and closes the pipes."""
        self.end()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what could not be written any more
                    pipe.close()


def _serve(
    worker: _Worker, todo: queue.SimpleQueue[tuple[int, Case]], done: queue.SimpleQueue[_Outcome], read_sass: bool
) -> None:
    """Hands a process one case after another, until there are no more or it has ended."""
    while True:
        try:
            index, case = todo.get_nowait()
        except queue.Empty:
            return
        found = worker.ask(case, read_sass)
        done.put(found if isinstance(found, InspectionError) else (index, found))
        if isinstance(found, InspectionError):
            return


@contextlib.contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """The variables of the processes: this one's modules, no interpreter, temporary files and a cache of their own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="microddp-kernels-", ignore_cleanup_errors=True) as folder:
        environment["TMPDIR"] = folder
        if not environment.get(_CACHE_VARIABLE):
            environment[_CACHE_VARIABLE] = folder
        yield environment


@contextlib.contextmanager
def _workers(count: int, environment: dict[str, str]) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_Worker(environment, tempfile.TemporaryFile("w+")))
        yield workers
    finally:
        for each in workers:
            each.close()

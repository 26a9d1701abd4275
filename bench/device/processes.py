"""Starts processes that import first and do their work when told to, so that nobody waits for imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.device.records import Outcome, outcome_of, read_records

__all__ = ["ROOT", "Child", "wait_until"]

ROOT: Final = Path(__file__).resolve().parents[2]
_POLL_S: Final = 0.02
_ERRORS_KEPT: Final = 4000


def wait_until(is_so: Callable[[], bool], deadline: float) -> bool:
    """Polls until ``is_so()`` or ``time.monotonic()`` reaches the deadline; says whether it is so."""
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


class Child:
    """One process of ``bench.device.child``. It ends by itself when this one does."""

    def __init__(
        self,
        name: str,
        function: str,
        folder: Path,
        *,
        prepare: str = "",
        stand_in: bool = False,
        needs_device: bool = False,
        env: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> None:
        """Starts it.

        Args:
            name: for its files in ``folder``.
            function: "module:function", called with a ``Context``.
            folder: of this run.
            prepare: the same, called before it is told to go.
            stand_in: see ``Context``.
            needs_device: it says so where there is none, unless on a stand-in.
            env: variables beside this process's own.
            own_session: ``kill`` ends all that it has started too.
        """
        self.name = name
        self._records, self._errors = folder / f"{name}.jsonl", folder / f"{name}.err"
        self._own_session = own_session
        self._started = time.monotonic()
        command = [sys.executable, "-m", "bench.device.child", function, "--records", str(self._records)]
        command += ["--prepare", prepare] * bool(prepare) + ["--stand-in"] * stand_in
        command += ["--needs-device"] * needs_device
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})},
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=own_session,
            )

    def is_ready(self) -> bool:
        """Whether it waits to be told to go; or has ended."""
        return self.has_ended() or any(each["kind"] == "ready" for each in read_records(self._records))

    def has_ended(self) -> bool:
        """Whether it has. It is not reaped before ``finish``, so that its number stays its own."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def has_failed(self) -> bool:
        """Whether it has ended without having finished its work."""
        return self.has_ended() and not any(each["kind"] == "end" for each in read_records(self._records))

    def has_finished(self) -> bool:
        """Whether its work is done, or it has ended."""
        return self.has_ended() or any(each["kind"] == "end" for each in read_records(self._records))

    def go(self, seconds: float, **options: Any) -> None:
        """Tells it to do its work within so many seconds."""
        self._started = time.monotonic()
        order = json.dumps({"seconds": seconds, "options": options}) + "\n"
        with contextlib.suppress(OSError):  # it has died: its outcome says so
            assert self._process.stdin is not None
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()

    def finish(self) -> Outcome:
        """Ends it, if it has not ended, and says how it went."""
        seconds = time.monotonic() - self._started
        was_running = not self.has_ended()
        with contextlib.suppress(ProcessLookupError):
            if self._own_session:
                os.killpg(self._process.pid, signal.SIGKILL)
            elif was_running:
                self._process.kill()
        exit_code = self._process.wait()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        errors = self._errors.read_text(errors="replace")[-_ERRORS_KEPT:]
        return outcome_of(read_records(self._records), None if was_running else exit_code, seconds, errors)

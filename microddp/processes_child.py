"""The other side of ``processes``: what one rank's process does, and what it and its parent say to each other."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from typing import Any, Final, NoReturn

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.errors import ClosedError, RemoteError, TransportError
from microddp.transport.gloo import GlooTransport
from microddp_kernels.dtypes import FLOATS8, UNSIGNED

__all__ = ["LAUNCH_PREFIX", "Died", "Raised", "Returned", "pickle_call", "rank_main", "unpickle"]

LAUNCH_PREFIX: Final = "microddp/launch"
CONNECT_TIMEOUT_S: Final = 120.0

_SENT_AS_BYTES: Final = UNSIGNED | FLOATS8


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank's result, pickled."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A rank's exception.

    ``error`` is None if it cannot be pickled, ``when`` is a ``time.monotonic()`` value; ``is_consequence`` says that it
    only tells of another rank's failure, which then explains more.
    """

    rank: int
    when: float
    error: bytes | None
    summary: str
    trace: str
    is_consequence: bool

    def describe(self) -> str:
        """One line."""
        return f"rank {self.rank} raised {self.summary}"

    def throw(self) -> NoReturn:
        """Raises the exception, or what can be said about it."""
        if self.error is None:
            raise RemoteError(f"{self.describe()}\n{self.trace}")
        raise unpickle(self.error) from RemoteError(f"{self.describe()}\n{self.trace}")


@dataclass(frozen=True, slots=True)
class Died:
    """A rank that is gone before it returned."""

    rank: int
    when: float
    how: str

    def describe(self) -> str:
        """One line."""
        return f"rank {self.rank} {self.how}"

    def throw(self) -> NoReturn:
        """Raises TransportError."""
        raise TransportError(f"{self.describe()} before it returned")


def pickle_call(target: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """``target(transport, *args)`` as bytes. Plain pickle: a tensor travels by value, not as shared memory.

    Raises:
        TypeError: names what cannot be pickled, and the remedy.
    """
    name = getattr(target, "__qualname__", repr(target))
    _require_picklable(target, f"the function {name!r}", "define it at the top level of a module")
    for index, argument in enumerate(args):
        _require_picklable(argument, f"argument {index} of {name!r}, a {type(argument).__name__},", "pass plain data")
    return _dumps((target, args))


def unpickle(data: bytes) -> Any:
    """What was pickled by this package's own process on the other end of a pipe."""
    return pickle.loads(data)


def rank_main(rank: int, world_size: int, host: str, port: int, connection: Connection) -> None:
    """The body of one rank's process: calls what comes through ``connection`` until it says to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        store = TCPStore(host, port, None, False, timeout=timedelta(seconds=CONNECT_TIMEOUT_S))
        prefixed = PrefixStore(LAUNCH_PREFIX, store)
        transport = GlooTransport(prefixed, rank, world_size, timeout=CONNECT_TIMEOUT_S, address=host)
    except Exception as error:
        _say(connection, _raised(rank, error))
        raise SystemExit(1) from None
    _serve(transport, connection)
    transport.close()


def _serve(transport: GlooTransport, connection: Connection) -> None:
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        if not call:
            return
        try:
            outcome = _call(transport, call)
        except SystemExit as leaving:
            _say(connection, Died(transport.rank, time.monotonic(), f"exited with code {leaving.code or 0}"))
            raise
        except Exception as error:
            # First the parent, so that it hears the cause before what follows from it on other ranks.
            _say(connection, _raised(transport.rank, error))
            transport.abort(error)
            transport.close()
            raise SystemExit(1) from None
        _say(connection, outcome)


def _call(transport: GlooTransport, call: bytes) -> Returned:
    try:
        target, args = unpickle(call)
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"rank {transport.rank} cannot import the function or an argument ({error}): "
            "define it at the top level of a module that other processes can import"
        ) from error
    result = target(transport, *args)
    what = f"the result of rank {transport.rank}, a {type(result).__name__},"
    _require_picklable(result, what, "return plain data or tensors")
    return Returned(_dumps(result))


class _Pickler(pickle.Pickler):
    """Pickles tensors of all types by value; torch's own form of some cannot be read again (torch 2.13)."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.dtype not in _SENT_AS_BYTES or value.device.type != "cpu":
            return NotImplemented
        return _tensor_of, (value.detach().reshape(-1).view(torch.uint8), value.dtype, tuple(value.shape))


def _tensor_of(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return data.view(dtype).view(shape)


def _dumps(value: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.getvalue()


def _require_picklable(value: Any, what: str, remedy: str) -> None:
    try:
        _dumps(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to another process ({error}): {remedy}") from error


def _raised(rank: int, error: Exception) -> Raised:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    payload: bytes | None
    try:
        payload = _dumps(error)
        unpickle(payload)  # an exception whose constructor wants other arguments fails only here
    except Exception:
        payload = None
    return Raised(rank, time.monotonic(), payload, f"{type(error).__name__}: {error}", trace, _is_consequence(error))


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, (ClosedError, RemoteError))


def _say(connection: Connection, outcome: Returned | Raised | Died) -> None:
    with contextlib.suppress(OSError):  # the parent has gone
        connection.send_bytes(_dumps(outcome))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

"""How the ranks of an NCCL communicator find each other: places, the unique id, the communicator, connections.

Everything that NCCL may block in for ever (the constructor, the first use of a peer) runs on a thread of its own, and
the caller waits for it until a deadline, or until another rank has failed.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import DistNetworkError

from microddp.errors import CollectiveTimeoutError, TransportError
from microddp.transport.bounded import BoundedStore, run_bounded
from microddp.transport.nccl_api import MAX_GROUP, UINT8, describe_nccl_error
from microddp.transport.noticeboard import Failure, Noticeboard, name_ranks

if TYPE_CHECKING:
    from microddp.device import DeviceRuntime
    from microddp.transport.nccl import NcclTransport

__all__ = ["Setup", "connect", "end_bounded", "explanation"]

_POLL_S: Final = 0.005
_ID_NBYTES: Final = 128
_END_S: Final = 2.0
_REASON_GRACE_S: Final = 0.6


class Setup:
    """The steps of one rank, each with the same deadline. A step that fails is published, so that all ranks raise.

    Attributes:
        store: whose calls have that deadline too.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: float, heard: Callable[[], Failure | None]
    ) -> None:
        """``heard``: what is known to have failed without asking the store, as that may be gone."""
        self._heard = heard
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._who = f"rank {rank} of {world_size}"
        self.store = BoundedStore(store, self._deadline, self._who)
        self._board = Noticeboard(self.store, rank, world_size)

    def publish(self, error: BaseException) -> None:
        """Tells the ranks that wait in a step why this one will not come."""
        try:
            kind = "timeout" if isinstance(error, CollectiveTimeoutError) else "remote"
            self._board.publish(Failure(kind, self._rank, f"rank {self._rank} failed to set up: {error}"))
        except (RuntimeError, OSError):
            return  # the store is gone, or does not answer: they will notice that too

    def exchange_places(self, identity: str) -> None:
        """Compares where the ranks are.

        Raises:
            TransportError: two ranks use one GPU, or a rank did not say where it is.
        """
        host_id = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        own = json.dumps([host_id, identity])
        self._set(f"place/{self._rank}", own)
        places = [json.loads(each) for each in self._gather("place", "where its GPU is")]
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            return
        holders: dict[tuple[str, str], list[int]] = {}
        for rank, (host, device) in enumerate(places):
            if device:
                holders.setdefault((host, device), []).append(rank)
        shared = [
            f"{name_ranks(ranks)} on {host} use GPU {device}" for (host, device), ranks in holders.items() if ranks[1:]
        ]
        if shared:
            raise TransportError(
                f"{self._who}: NCCL takes one rank a GPU, but {'; '.join(shared)}: pass device=local_rank, "
                "start no more ranks than GPUs, or use the gloo transport"
            )

    def unique_id(self, make: Callable[[], bytes]) -> bytes:
        """The communicator's id: made by rank 0, or the reason why it could not be.

        Raises:
            TransportError: on every rank, if rank 0 failed or did not come in time.
        """
        key = "unique_id"
        # Before anything of NCCL's is begun all lifelines stand: whoever dies from here on is named by all others.
        self._set(f"linked/{self._rank}", "")
        if self._rank == 0:
            self._gather("linked", "that it is linked with its neighbours")
            try:
                made = make()
                self._set(key, "ok:" + made.hex())
            except Exception as error:
                text = describe_nccl_error(error) or f"{type(error).__name__}: {error}"
                self._set(key, f"error:{text}")
                raise TransportError(f"{self._who} could not make a unique id: {text}") from error
            return made
        state, _, text = self._wait([key], lambda _: "rank 0 published no unique id")[0].partition(":")
        if state != "ok" or len(text) != 2 * _ID_NBYTES:
            raise TransportError(f"{self._who}: rank 0 could not make a unique id: {text}")
        return bytes.fromhex(text)

    def create(self, api: Any, runtime: DeviceRuntime, unique_id: bytes) -> Any:
        """The communicator, whose constructor blocks until all ranks have come.

        Raises:
            TransportError: NCCL failed, or some rank did not come in time.
        """

        def make() -> Any:
            with runtime.guard():  # it belongs to the current device of the thread that makes it
                return api.NcclCommunicator(self._world_size, unique_id, self._rank)

        what = f"{self._who}, making the NCCL communicator"
        try:
            return _run_nccl(make, self._deadline, self._failure, what)
        except DistNetworkError as error:
            raise self._lost_store("; the communicator is not made").exception(what) from error

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(key, value)
        except DistNetworkError as error:
            raise self._lost_store("").exception(self._who) from error

    def _gather(self, name: str, what: str) -> list[str]:
        def describe(missing: Sequence[int]) -> str:
            return f"{name_ranks(missing)} did not say {what}"

        return self._wait([f"{name}/{rank}" for rank in range(self._world_size)], describe)

    def _wait(self, keys: Sequence[str], describe: Callable[[Sequence[int]], str]) -> list[str]:
        """The values of keys that other ranks set."""
        delay = 0.0005
        missing: Sequence[int] = range(len(keys))
        try:
            while not self.store.check(list(keys)):
                failure = self._failure()
                if failure is not None:
                    raise failure.exception(self._who)
                missing = [place for place, key in enumerate(keys) if not self.store.check([key])]
                if missing and time.monotonic() >= self._deadline:
                    text = f"{describe(missing)} within {self._timeout:g} s"
                    raise Failure("timeout", self._rank, text).exception(self._who)
                time.sleep(delay)
                delay = min(2 * delay, 0.05)
            return [bytes(self.store.get(key)).decode() for key in keys]
        except DistNetworkError as error:
            meanwhile = f"; {describe(missing)}" if missing else ""
            raise self._lost_store(meanwhile).exception(self._who) from error

    def _failure(self) -> Failure | None:
        return self._heard() or self._board.failure()

    def _lost_store(self, meanwhile: str) -> Failure:
        """Why the store is gone: a rank that died with it, if the lifeline stands and says so."""
        text = f"rank {self._rank} lost its connection to the store{meanwhile}"
        return explanation(self._heard) or Failure("lost", self._rank, text)


def _run_nccl(task: Callable[[], Any], deadline: float, failure: Callable[[], Failure | None], what: str) -> Any:
    """``run_bounded`` for a call of NCCL, until another rank has failed.

    Raises:
        TransportError: the deadline passed, another rank failed, or NCCL did.
    """

    def check() -> None:
        if (known := failure()) is not None:
            raise known.exception(what)

    try:
        return run_bounded(task, deadline, what, check)
    except Exception as error:
        text = describe_nccl_error(error)
        if text is None:
            raise
        raise TransportError(f"{what}: {text}") from error


def explanation(heard: Callable[[], Failure | None]) -> Failure | None:
    """Waits a moment for a better reason than that something broke: the rank that caused it, or its death, says why."""
    until = time.monotonic() + _REASON_GRACE_S
    while heard() is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return heard()


def connect(transport: NcclTransport, edges: Sequence[tuple[int, bool]], deadline: float) -> None:
    """Connects with peers, (peer, is a send) each. Blocks the host until they do so too.

    Raises:
        TransportError: one did not come, or failed; then the transport is broken on all ranks.
    """
    peers = name_ranks(sorted({peer for peer, _ in edges}))
    what = f"rank {transport.rank} of {transport.world_size}, connecting with {peers}"
    try:
        _run_nccl(lambda: touch(transport, edges), deadline, lambda: transport.failure, what)
    except CollectiveTimeoutError:
        exchange = transport.open_exchange
        missing = "" if exchange is None else transport.watchdog.describe_missing(exchange.header)
        text = f"the deadline passed on rank {transport.rank}, connecting with {peers}{missing}"
        raise transport.agree(Failure("timeout", transport.rank, text)).exception(what) from None
    except TransportError as error:
        failure = explanation(lambda: transport.failure)
        if failure is not None:
            raise failure.exception(what) from error
        transport.abort(error)
        raise


def touch(transport: NcclTransport, edges: Sequence[tuple[int, bool]]) -> None:
    """Sends one byte over each edge, (peer, is a send). May block for ever.

    Ranks of one distance on the ring come together, so that both ends cut the groups alike.
    """
    rank, world_size, comm, scratch = transport.rank, transport.world_size, transport.comm, transport.scratch
    if scratch is None or comm is None:  # aborted meanwhile: what is enqueued next says why
        return
    far = {(peer, is_send): (peer - rank if is_send else rank - peer) % world_size for peer, is_send in edges}
    ordered = sorted(edges, key=lambda edge: far[edge])
    with transport.runtime.guard():
        for _, part in itertools.groupby(ordered, key=lambda edge: far[edge] // (MAX_GROUP // 2)):
            transport.api.groupStart()
            try:
                for peer, is_send in part:
                    call = comm.send if is_send else comm.recv
                    call(scratch.data_ptr() + 2 * peer + is_send, 1, UINT8, peer, transport.groups_handle)
            finally:
                transport.api.groupEnd()


def end_bounded(comm: Any, how: str, runtime: DeviceRuntime, rank: int) -> None:
    """Aborts or destroys a communicator; aborts it if it cannot be destroyed. What blocks is left behind."""
    ended = threading.Event()

    def end() -> None:
        try:
            with runtime.guard():
                getattr(comm, how)()
        finally:
            ended.set()

    threading.Thread(target=end, name=f"microddp-{how}-{rank}", daemon=True).start()
    if not ended.wait(_END_S) and how == "destroy":
        end_bounded(comm, "abort", runtime, rank)

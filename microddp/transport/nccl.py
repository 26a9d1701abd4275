"""Messages between GPUs by NCCL's send and receive, through CuPy's bindings, as raw bytes on a stream.

NCCL knows no tags, no deadlines and, on one host, no deaths: headers are compared beside it, its blocking calls run on
threads that can be given up, and a watchdog ends what is stuck (see ``stream_watchdog``).
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch

from microddp.device import DeviceRuntime
from microddp.errors import ClosedError, TransportError
from microddp.transport.base import Header, Transfer
from microddp.transport.gloo_group import clone
from microddp.transport.lifeline import Lifeline
from microddp.transport.nccl_api import load_nccl
from microddp.transport.nccl_exchange import NcclExchange
from microddp.transport.nccl_group import PreparedGroup, prepare_group
from microddp.transport.nccl_setup import Setup, connect, end_bounded
from microddp.transport.noticeboard import STORE_TIMEOUT_S, Failure
from microddp.transport.stream import NotCapturableError, StreamTransport
from microddp.transport.stream_board import StreamBoard
from microddp.transport.stream_meeting import meet_ranks
from microddp.transport.stream_reports import StreamReports
from microddp.transport.stream_watchdog import StreamWatchdog

__all__ = ["NcclTransport"]

_CALL_S: Final = 0.5
"""How long a call of NCCL that should not block may delay an abort."""


class NcclTransport(StreamTransport):
    """One rank's communicator on one device, and what watches over it.

    Attributes:
        runtime: the device's streams.
        failure: why nothing works any more.
        comm, api: CuPy's communicator (None for one rank) and the module that it comes from.
        groups_handle: the stream of the transfers, as NCCL takes it.
        calling: held while NCCL is called and cannot block, so that the communicator is not aborted under the call.
    """

    name = "nccl"

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        device: torch.device | None = None,
        runtime: DeviceRuntime | None = None,
        api: Any = None,
        address: str | None = None,
        watchdog_period: float = 0.5,
    ) -> None:
        """Makes the communicator together with all other ranks.

        Args:
            store: a torch.distributed store that all ranks reach, under a prefix that only this transport uses.
            timeout: how long to wait for the other ranks here, in seconds.
            device: the rank's GPU; None: torch's current one.
            runtime: other streams than those of CUDA, on another device.
            api: what has the names of ``cupy.cuda.nccl``; None: that.
            address: the local address at which the neighbours' lifelines connect; None: chosen.
            watchdog_period: after how many seconds in one collective the ranks' headers are compared.

        Raises:
            ValueError: ``rank`` or ``world_size`` make no sense.
            TransportError: CuPy, NCCL or the GPU is missing, two ranks share a GPU, or a rank failed or did not come.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0..{world_size - 1} (world size {world_size})")
        super().__init__(rank, world_size)
        self.failure: Failure | None = None
        self.closed = False
        self.open_exchange: NcclExchange | None = None
        self.comm: Any = None
        self.api: Any = None
        self.scratch: torch.Tensor | None = None
        self._lifeline: Lifeline | None = None
        self.calling = threading.Lock()
        self._lock = threading.Lock()
        self._events: deque[Any] = deque()
        self._edges: set[tuple[int, bool]] = set()
        self._store = store  # which may hold the server that all ranks use
        board = StreamBoard(self._set_up(store, timeout, device, runtime, api, address), rank, world_size)
        self.device_types = (self.runtime.device.type,)
        self.reports = StreamReports(board, watchdog_period)
        self.watchdog = StreamWatchdog(self, self.reports)
        # At exit the last one first: a communicator over this transport ends its works and graphs before.
        self._at_exit = weakref.finalize(NcclTransport, self.close)

    def open(self, header: Header, deadline: float) -> NcclExchange:
        """See ``StreamTransport.open``."""
        self._check_usable(header)
        history = self.reports.history
        history.enter(header)
        if self.world_size > 1 and not history.is_known(header):
            try:
                self.meet(header, deadline)
            except BaseException as error:
                self.abort(error)  # an interrupt: the others wait for this rank
                raise
        self.open_exchange = exchange = NcclExchange(self, header, deadline)
        return exchange

    def open_captured(self, header: Header) -> NcclExchange:
        """See ``StreamTransport.open_captured``."""
        self._check_usable(header)
        history = self.reports.history
        if self.world_size > 1 and not history.is_known(header):
            raise NotCapturableError(
                f"rank {self.rank} of {self.world_size}: {header.collective} of {header.dtype}{list(header.shape)} by "
                f"{header.algorithm} is captured before it has run: call it once, on all ranks, before the capture"
            )
        history.enter(header)
        self.open_exchange = exchange = NcclExchange(self, header, float("inf"), is_captured=True)
        return exchange

    def prepare(self, edges: Sequence[tuple[int, bool]], deadline: float) -> None:
        """See ``StreamTransport.prepare``: NCCL connects two ranks in their first transfer, which blocks the host."""
        new = [edge for edge in dict.fromkeys(edges) if edge not in self._edges]
        if not new or self.comm is None:
            return
        connect(self, new, deadline)
        self._edges.update(new)

    def group(self, transfers: Sequence[Transfer]) -> PreparedGroup:
        """See ``StreamTransport.group``."""
        return prepare_group(transfers, self.rank, self.world_size, self.runtime.device)

    def meet(self, header: Header, deadline: float) -> None:
        """Waits on the host until all ranks have entered this collective, and compares what they call.

        Raises:
            MismatchError: the ranks disagree; the text names both values.
            TransportError: a rank failed, refused its arguments, or did not come.
        """
        context = f"rank {self.rank} of {self.world_size}: {header.collective} by {header.algorithm}"
        context += f", collective {header.sequence}"
        failure = meet_ranks(self.watchdog.store, self.reports, header, deadline, lambda: self.failure)
        if failure is not None:
            raise self.agree(failure).exception(context)

    def agree(self, suspicion: Failure) -> Failure:
        """Breaks this transport on all ranks, for the reason that was the first; returns that."""
        if self.failure is None:
            agreed = self.watchdog.store.call(lambda: self.reports.board.publish(suspicion), STORE_TIMEOUT_S)
            self.learn(agreed or suspicion)
        return self.failure or suspicion

    def reject(self, sequence: int, error: BaseException) -> None:
        """See ``Transport.reject``."""
        if self.world_size == 1 or self.closed or self.failure is not None:
            return
        text = f"rank {self.rank} refused collective {sequence}: {type(error).__name__}: {error}"
        failure = Failure("remote", self.rank, text)
        self.watchdog.store.call(lambda: self.reports.board.reject(sequence, failure), STORE_TIMEOUT_S)

    def abort(self, error: BaseException) -> None:
        """See ``Transport.abort``."""
        if self.closed or self.failure is not None:
            return
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        self.learn(Failure("remote", self.rank, f"rank {self.rank} raised {type(error).__name__}: {error}\n{trace}"))

    def synchronize(self, timeout: float | None = None) -> None:
        """See ``Transport.synchronize``."""
        until = None if timeout is None else time.monotonic() + timeout
        for flight in self.watchdog.unfinished():
            flight.synchronize(None if until is None else max(until - time.monotonic(), 0.0))
        if self.failure is not None:
            raise self.failure.exception(f"rank {self.rank} of {self.world_size}")

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self._at_exit.detach()
        if self.watchdog.pending():
            self.learn(Failure("closed", self.rank, f"rank {self.rank} closed its transport"))
        self.watchdog.store.call(self.reports.close, STORE_TIMEOUT_S)
        if self._lifeline is not None:
            self._lifeline.close()
        self.watchdog.stop(STORE_TIMEOUT_S)
        self._end_communicator("destroy" if self.failure is None else "abort")

    def learn(self, failure: Failure) -> None:
        """Breaks this transport, from any thread, and tells the others. The watchdog ends what the device is doing."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        if self._lifeline is not None:
            self._lifeline.publish(failure)
        self.watchdog.store.tell(lambda: self.reports.board.publish(failure))
        self.watchdog.wake()

    def check_device(self) -> bool:
        """Whether NCCL has no error to report; False also if that cannot be told now, as another thread calls NCCL.

        Raises:
            Exception: the error of what was enqueued before.
        """
        if not self.calling.acquire(blocking=False):
            return False
        try:
            if self.comm is not None:
                self.comm.check_async_error()
            return True
        finally:
            self.calling.release()

    def abort_communicator(self) -> None:
        """Ends what the device is doing for this communicator, from any thread."""
        is_mine = self.calling.acquire(timeout=_CALL_S)
        try:
            self._end_communicator("abort")
        finally:
            if is_mine:
                self.calling.release()

    def take_event(self) -> Any:
        """An event for marking how far a collective is."""
        try:
            return self._events.popleft()
        except IndexError:
            return self.runtime.new_event()

    def recycle(self, events: Sequence[Any]) -> None:
        """Takes events back."""
        self._events.extend(events)

    def _set_up(self, store: Any, timeout: float, device: Any, runtime: Any, api: Any, address: str | None) -> Any:
        """Returns the store over a connection of its own: a store's calls wait for each other."""
        rank, world_size = self.rank, self.world_size
        setup = Setup(store, rank, world_size, timeout, lambda: self.failure)
        try:
            if runtime is None:
                from microddp.device_cuda import CudaRuntime

                runtime = CudaRuntime(device)
            self.runtime = runtime
            self.api = api or (load_nccl() if world_size > 1 else None)
            with runtime.guard():
                self.groups, self.kernels = runtime.new_stream(), runtime.new_stream()
            self.groups_handle = runtime.handle(self.groups)
            if world_size > 1:
                setup.exchange_places(runtime.identity())
                self._lifeline = Lifeline(
                    setup.store, rank, world_size, timeout=timeout, on_failure=self._hear, address=address
                )
                unique_id = setup.unique_id(self.api.get_unique_id)
                self.scratch = torch.zeros(2 * world_size, dtype=torch.uint8, device=runtime.device)
                self.comm = setup.create(self.api, runtime, unique_id)
            return setup.store.call(lambda: clone(store))
        except BaseException as error:
            setup.publish(error)
            if self._lifeline is not None:
                self._lifeline.close()
            self._end_communicator("abort")
            raise

    def _hear(self, failure: Failure) -> None:
        """Called by the lifeline: a rank died, or failed."""
        if hasattr(self, "watchdog"):
            self.learn(failure)
        else:
            self.failure = self.failure or failure

    def _end_communicator(self, how: str) -> None:
        """Aborts or destroys it, once. Both may block in NCCL: then they are left behind."""
        with self._lock:
            comm, self.comm = self.comm, None
        if comm is not None:
            end_bounded(comm, how, self.runtime, self.rank)

    def _check_usable(self, header: Header) -> None:
        if self.closed:
            raise ClosedError(f"rank {self.rank}: the transport was closed")
        if self.failure is not None:
            raise self.failure.closed_error(self.rank)
        if self.open_exchange is not None:
            raise TransportError(
                f"rank {self.rank}: collective {header.sequence} was begun before "
                f"{self.open_exchange.header.sequence} was finished"
            )

"""A communicator: one rank's end of collectives among ``world_size`` ranks."""

from __future__ import annotations

import weakref
from functools import partial
from types import TracebackType
from typing import Literal, TypeVar, overload

import torch

from microddp.calls import Calls
from microddp.collectives import Collectives
from microddp.planner import Choice, Planner
from microddp.transport.base import Counters, Transport
from microddp.work import Work
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["DEFAULT_TIMEOUT_S", "Communicator"]

DEFAULT_TIMEOUT_S = 300.0

Array = TypeVar("Array")
Op = str | ReduceOp
Wire = torch.dtype | str | None


class Communicator:
    """Collectives on torch tensors, NumPy arrays and CuPy arrays of any layout.

    All ranks call the same collectives in the same order, with the same shape, dtype and options. Arguments that are
    refused raise ValueError or TypeError before anything is sent, here and, as ``RemoteError``, on the other ranks; if
    all ranks refuse the same call, the communicator stays usable. After a failure in flight it does not: every
    later call raises ``ClosedError`` with the reason, and the tensors of the failed call are undefined. That ranks are
    off by one identical call cannot be seen.

    Contributions of 16- and 8-bit floats are combined in float32. With ``async_op=True`` a call returns a ``Work`` at
    once and runs in the background, in order; its tensors must not be touched until ``wait()`` returns, and later
    synchronous calls queue behind it. Nothing is differentiated: a tensor that needs grad is refused unless grad mode
    is off. Calls from several threads run one after the other.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        slice_nbytes: int | None = None,
        num_slots: int | None = None,
        launcher: str | None = None,
    ) -> None:
        """Takes over ``transport`` and closes it at the end.

        Args:
            timeout: seconds that one collective may take.
            slice_nbytes, num_slots: how large the pieces of a chunk are and between how many staging buffers they
                alternate; None: chosen by size. The same on all ranks.
            launcher: what combines, "eager", "interpreter" or "compiled"; None: chosen by device.

        Raises:
            ValueError: ``timeout``, ``slice_nbytes`` or ``num_slots`` make no sense.
        """
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
        self._transport = transport
        self._planner = Planner(transport, slice_nbytes=slice_nbytes, num_slots=num_slots, launcher=launcher)
        self._collectives = Collectives(transport, self._planner)
        self._calls = Calls(transport, timeout)
        self._finalizer = weakref.finalize(self, self._calls.close)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._transport.world_size

    @property
    def transport_name(self) -> str:
        """What moves the bytes: "thread", "gloo" …"""
        return self._transport.name

    @property
    def counters(self) -> Counters:
        """What was sent and received so far; ``counters.reset()`` sets it to zero."""
        return self._transport.counters

    @property
    def last_choice(self) -> Choice | None:
        """What the last collective ran with: the algorithm that ``algorithm=None`` chose, slices, transport."""
        return self._calls.last_choice

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory held now."""
        return self._planner.pool.nbytes

    @property
    def timeout(self) -> float:
        """Seconds that one collective may take; may be set."""
        return self._calls.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {seconds}")
        self._calls.timeout = seconds

    @overload
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        out: Array | None = None,
        async_op: Literal[False] = False,
        wire_dtype: Wire = None,
    ) -> Array: ...

    @overload
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        out: Array | None = None,
        *,
        async_op: Literal[True],
        wire_dtype: Wire = None,
    ) -> Work[Array]: ...

    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        out: Array | None = None,
        async_op: bool = False,
        wire_dtype: Wire = None,
    ) -> Array | Work[Array]:
        """Combines the ranks' tensors elementwise; every rank gets the result.

        Args:
            x: the contribution, of the same shape on all ranks. The result overwrites it, unless ``out`` is given.
                For an operator of several lanes a tuple of tensors, one a lane, of one shape; a wide lane's shape has
                further dimensions behind it.
            op: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", the name of another operator, or a ReduceOp
                (``@microddp.reduce_op`` makes one of a Triton function); docs/operators.md says what each does.
            algorithm: "naive", "tree", "ring", "full_ring", "direct" or a registered one; None chooses by size and
                number of ranks, and ``last_choice`` says what.
            order: "rank" combines from the left in rank order: the same bits by naive, direct and full_ring.
                Without it, full_ring leaves different bits on different ranks, and is never chosen.
            out: where to put the result: the very view that ``x`` is, or memory that ``x`` does not share.
            async_op: return a ``Work`` at once.
            wire_dtype: the float type (or its name) that travels in place of that of ``x``: bfloat16, float16 or float8
                for float32 to send fewer bytes, float32 for 16-bit tensors to round only once. Partial results are
                rounded to it; with order="rank" every contribution is, first.

        Returns:
            ``x`` itself, or ``out`` itself if given.

        Raises:
            ValueError, TypeError: arguments; nothing was sent.
            TransportError: a failure in flight; ``x`` (or ``out``) is then undefined.
            ClosedError: closed, or broken by an earlier failure.
        """
        check = partial(self._collectives.all_reduce, x, op, algorithm, order, out, wire_dtype)
        result: Array | Work[Array] = self._calls.run("all_reduce", check, async_op)
        return result

    @overload
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        out: Array | None = None,
        async_op: Literal[False] = False,
        wire_dtype: Wire = None,
    ) -> Array: ...

    @overload
    def reduce_scatter(
        self, x: Array, op: Op = "sum", out: Array | None = None, *, async_op: Literal[True], wire_dtype: Wire = None
    ) -> Work[Array]: ...

    def reduce_scatter(
        self, x: Array, op: Op = "sum", out: Array | None = None, async_op: bool = False, wire_dtype: Wire = None
    ) -> Array | Work[Array]:
        """Combines the ranks' tensors and gives each rank its part, as torch's ``reduce_scatter_tensor``.

        Args:
            x: shape (world_size * k, ...); left as it is.
            op: as in ``all_reduce``, of one lane.
            out: shape (k, ...), where to put the part; shares no memory with ``x``.
            async_op: return a ``Work`` at once.
            wire_dtype: as in ``all_reduce``.

        Returns:
            Rows rank * k to (rank + 1) * k of the result: a new array, or ``out``.

        Raises:
            ValueError: dimension 0 cannot be cut into world_size equal parts. Else as ``all_reduce``.
        """
        check = partial(self._collectives.reduce_scatter, x, op, out, wire_dtype)
        result: Array | Work[Array] = self._calls.run("reduce_scatter", check, async_op)
        return result

    @overload
    def all_gather(self, x: Array, out: Array | None = None, async_op: Literal[False] = False) -> Array: ...

    @overload
    def all_gather(self, x: Array, out: Array | None = None, *, async_op: Literal[True]) -> Work[Array]: ...

    def all_gather(self, x: Array, out: Array | None = None, async_op: bool = False) -> Array | Work[Array]:
        """Concatenates the ranks' tensors along dimension 0, as torch's ``all_gather_into_tensor``.

        Args:
            x: shape (k, ...), the same on all ranks; left as it is. A 0-dimensional one counts as shape (1,).
            out: shape (world_size * k, ...); shares no memory with ``x``.
            async_op: return a ``Work`` at once.

        Returns:
            Shape (world_size * k, ...): a new array, or ``out``. Raises as ``all_reduce``.
        """
        check = partial(self._collectives.all_gather, x, out)
        result: Array | Work[Array] = self._calls.run("all_gather", check, async_op)
        return result

    @overload
    def broadcast(self, x: Array, root: int = 0, async_op: Literal[False] = False) -> Array: ...

    @overload
    def broadcast(self, x: Array, root: int = 0, *, async_op: Literal[True]) -> Work[Array]: ...

    def broadcast(self, x: Array, root: int = 0, async_op: bool = False) -> Array | Work[Array]:
        """Overwrites every rank's ``x`` with that of ``root``. Returns ``x`` itself; raises as ``all_reduce``."""
        check = partial(self._collectives.broadcast, x, root)
        result: Array | Work[Array] = self._calls.run("broadcast", check, async_op)
        return result

    @overload
    def reduce(
        self, x: Array, op: Op = "sum", root: int = 0, async_op: Literal[False] = False, wire_dtype: Wire = None
    ) -> Array: ...

    @overload
    def reduce(
        self, x: Array, op: Op = "sum", root: int = 0, *, async_op: Literal[True], wire_dtype: Wire = None
    ) -> Work[Array]: ...

    def reduce(
        self, x: Array, op: Op = "sum", root: int = 0, async_op: bool = False, wire_dtype: Wire = None
    ) -> Array | Work[Array]:
        """Combines the ranks' tensors into the ``x`` of ``root``; on other ranks ``x`` is left as it is.

        ``op`` and ``wire_dtype`` as in ``all_reduce``. Returns ``x`` itself on every rank; raises as ``all_reduce``.
        """
        check = partial(self._collectives.reduce, x, op, root, wire_dtype)
        result: Array | Work[Array] = self._calls.run("reduce", check, async_op)
        return result

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._calls.run("barrier", self._collectives.barrier, False)

    def close(self) -> None:
        """Lets go of connections, threads and memory. Idempotent.

        Works that are pending are given a moment to end, then aborted: their ``wait()`` raises, on all ranks.
        """
        self._finalizer()
        self._planner.clear()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._calls.abort(error)  # so that no other rank waits for this one
        self.close()

    def __repr__(self) -> str:
        state = "" if self._calls.is_usable else ", closed"
        return f"<Communicator rank {self.rank} of {self.world_size} over {self.transport_name}{state}>"

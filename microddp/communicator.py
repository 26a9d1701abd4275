"""A communicator: one rank's end of collectives among ``world_size`` ranks."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeVar, overload

import torch

from microddp.arrays import copy_of
from microddp.lifecycle import DEFAULT_TIMEOUT_S, Lifecycle
from microddp.stream_work import GraphedCollective
from microddp.work import Work
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["DEFAULT_TIMEOUT_S", "Communicator"]

Array = TypeVar("Array")
Op = str | ReduceOp
Wire = torch.dtype | str | None


class Communicator(Lifecycle):
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

    def capture_all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        wire_dtype: Wire = None,
    ) -> GraphedCollective[Array]:
        """Captures an in-place all-reduce of ``x`` into a CUDA graph, to be replayed with whatever ``x`` then holds.

        Runs once on a copy of ``x`` first, so that ranks are connected and kernels compiled. All ranks capture, and
        replay, in the same order with their other collectives. Arguments as in ``all_reduce``; ``x`` must stay where it
        is. ``all_reduce`` itself can be captured too, within the caller's own ``torch.cuda.graph``, after it has run.

        Raises:
            ValueError: the transport has no graphs; else as ``all_reduce``.
        """
        job = partial(self._collectives.all_reduce, x, op, algorithm, order, None, wire_dtype)
        if self._transport.stream_ordered:
            copies = tuple(map(copy_of, x)) if isinstance(x, (tuple, list)) else copy_of(x)
            self.all_reduce(copies, op, algorithm, order, wire_dtype=wire_dtype)
        return self._calls.capture("capture_all_reduce", job)

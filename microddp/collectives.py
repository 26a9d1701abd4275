"""Each collective's arguments, checked, and what happens to the caller's arrays before and after the plan runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from microddp.arrays import Operand, check_out, check_tensor, check_writable, new_like, operand_of
from microddp.plan.instructions import Buffer, Plan
from microddp.planner import Choice, Planner, Prepared, Signature
from microddp.schedule import Schedule, find_algorithm
from microddp.schedule.registry import Collective
from microddp.transport.base import Transport
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["Collectives", "Job"]


@dataclass(slots=True)
class Job:
    """A collective whose arguments are right. Nothing has been read, copied or sent yet.

    Attributes:
        prepared: what to run.
        load: makes the 1-D tensor that the plan works on.
        store: puts the result where the caller wants it.
        result: what the caller gets.
        owner: the caller's tensor, if the plan works on its memory.
    """

    prepared: Prepared
    load: Callable[[], torch.Tensor]
    store: Callable[[torch.Tensor], None]
    result: Any
    owner: torch.Tensor | None = None


class Collectives:
    """Makes the jobs of one rank, on the caller's thread. What a method refuses raises ValueError or TypeError."""

    def __init__(self, transport: Transport, planner: Planner) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._planner, self._transport = planner, transport
        self._device_types = device_types(transport)

    def all_reduce(self, x: Any, op: Any, algorithm: Any, order: Any, out: Any) -> Job:
        source = self._operand(x, "x")
        target = source
        if out is not None:
            target = self._operand(out, "out")
            if check_out(target, source, source.tensor.shape):
                source = target
        check_writable(target, "x" if out is None else "out")
        prepared = self._prepare(
            "all_reduce", source, None, _op(op), _name(algorithm, "algorithm"), _name(order, "order")
        )
        if source is target:
            return _in_place(prepared, target)
        return _out_of_place(prepared, source, target)

    def reduce_scatter(self, x: Any, op: Any, out: Any) -> Job:
        source = self._operand(x, "x")
        shape = tuple(source.tensor.shape)
        if not shape or shape[0] % self.world_size:
            size = f"shape {shape}" if shape else "no dimension"
            raise ValueError(f"x has {size}; reduce_scatter cuts dimension 0 into {self.world_size} equal parts")
        target = self._result(out, source, (shape[0] // self.world_size, *shape[1:]))
        prepared = self._prepare("reduce_scatter", source, op=_op(op))
        numel = target.tensor.numel()
        part = slice(self.rank * numel, (self.rank + 1) * numel)
        return Job(prepared, source.copy, lambda flat: target.store(flat[part]), target.array)

    def all_gather(self, x: Any, out: Any) -> Job:
        source = self._operand(x, "x")
        shape = tuple(source.tensor.shape) or (1,)
        target = self._result(out, source, (shape[0] * self.world_size, *shape[1:]))
        prepared = self._prepare("all_gather", source, numel=target.tensor.numel())
        numel = source.tensor.numel()
        part = slice(self.rank * numel, (self.rank + 1) * numel)

        def load() -> torch.Tensor:
            flat = target.room()
            source.write_to(flat[part])
            return flat

        return Job(prepared, load, target.store, target.array)

    def broadcast(self, x: Any, root: Any) -> Job:
        source = self._operand(x, "x")
        prepared = self._prepare("broadcast", source, root=self._root(root))
        if not prepared.writes:
            return Job(prepared, source.flat, _nothing, x, _owner(source))
        check_writable(source, "x")
        return _in_place(prepared, source)

    def reduce(self, x: Any, op: Any, root: Any) -> Job:
        source = self._operand(x, "x")
        prepared = self._prepare("reduce", source, op=_op(op), root=self._root(root))
        if self.rank == root:
            check_writable(source, "x")
            return _in_place(prepared, source)
        load = source.copy if prepared.writes else source.flat
        return Job(prepared, load, _nothing, x, None if prepared.writes else _owner(source))

    def barrier(self) -> Job:
        plan = Plan(self.rank, self.world_size, 0, 1, (Buffer("data", 0),), (), (), 16)
        schedule = Schedule(find_algorithm("broadcast"), self.world_size)
        device = torch.device("cuda" if self._transport.stream_ordered else "cpu")
        engine = self._planner.engine(device)
        choice = Choice("barrier", "barrier", None, 16, 0, self._transport.name, engine.launcher.name)
        header = ("barrier", "barrier", "none", "uint8", (0,), 0, 16)
        prepared = Prepared(schedule, plan, None, engine, choice, False, header)
        return Job(prepared, lambda: torch.empty(0, dtype=torch.uint8, device=device), _nothing, None)

    def _operand(self, array: Any, name: str) -> Operand:
        operand = operand_of(array, name)
        check_tensor(operand, name, self._device_types, self._transport.name)
        return operand

    def _result(self, out: Any, source: Operand, shape: tuple[int, ...]) -> Operand:
        if out is None:
            return new_like(source, shape)
        target = self._operand(out, "out")
        check_out(target, source, shape)
        check_writable(target, "out")
        return target

    def _prepare(
        self,
        collective: Collective,
        source: Operand,
        numel: int | None = None,
        op: str | ReduceOp | None = None,
        algorithm: str | None = None,
        order: str | None = None,
        root: int = 0,
    ) -> Prepared:
        tensor = source.tensor
        numel = tensor.numel() if numel is None else numel
        shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
        return self._planner.prepare(Signature(collective, shape, dtype, device, numel, op, algorithm, order, root))

    def _root(self, root: Any) -> int:
        if not isinstance(root, int) or isinstance(root, bool):
            raise TypeError(f"root must be an int, not {type(root).__name__}")
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not one of the {self.world_size} ranks (0 to {self.world_size - 1})")
        return root


def device_types(transport: Transport) -> tuple[str, ...]:
    """Where the tensors may be: a stream-ordered transport moves device memory, of the others only threads can."""
    if transport.stream_ordered:
        return ("cuda",)
    return ("cpu", "cuda") if transport.name == "thread" else ("cpu",)


def _op(op: Any) -> str | ReduceOp:
    """The op if it can be looked up; raises what ``get_op`` raises if it is nothing of the kind."""
    return op if isinstance(op, (str, ReduceOp)) else get_op(op)


def _name(value: Any, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{what} must be a str or None, not {value!r}")


def _owner(operand: Operand) -> torch.Tensor | None:
    array = operand.array
    return array if array is operand.tensor and operand.is_dense() else None


def _in_place(prepared: Prepared, target: Operand) -> Job:
    store = target.store if prepared.writes else _nothing
    return Job(prepared, target.flat, store, target.array, _owner(target))


def _out_of_place(prepared: Prepared, source: Operand, target: Operand) -> Job:
    def load() -> torch.Tensor:
        flat = target.room()
        source.write_to(flat)
        return flat

    return Job(prepared, load, target.store, target.array, _owner(target))


def _nothing(flat: torch.Tensor) -> None:
    return None

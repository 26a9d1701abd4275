"""Each collective's arguments, checked, and what happens to the caller's arrays before and after the plan runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from microddp.arrays import Operand, check_out, check_tensor, check_writable, new_like, operand_of
from microddp.lanes import lane_widths, rows_of
from microddp.memory import shares_memory
from microddp.plan.instructions import Buffer, Plan
from microddp.planner import Choice, Planner, Prepared, Signature
from microddp.schedule import Schedule, find_algorithm
from microddp.schedule.registry import Collective
from microddp.transport.base import Transport
from microddp.transport.stream import StreamTransport
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["Collectives", "Job"]


@dataclass(slots=True)
class Job:
    """A collective whose arguments are right. Nothing has been read, copied or sent yet.

    Attributes:
        prepared: what to run.
        load: makes the 1-D tensors that the plan works on, one a lane.
        store: puts the result where the caller wants it.
        result: what the caller gets.
        owner: the caller's tensor, if the plan works on its memory.
        array: what the caller passed, or its first lane; on a device its stream counts.
    """

    prepared: Prepared
    load: Callable[[], Values]
    store: Callable[[Any], None]
    result: Any
    owner: torch.Tensor | None = None
    array: Any = None


class Collectives:
    """Makes the jobs of one rank, on the caller's thread. What a method refuses raises ValueError or TypeError."""

    def __init__(self, transport: Transport, planner: Planner) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._planner, self._transport = planner, transport
        self._runtime = transport.runtime if isinstance(transport, StreamTransport) else None

    def all_reduce(self, x: Any, op: Any, algorithm: Any, order: Any, out: Any, wire_dtype: Any) -> Job:
        found = _op(op)
        sources = self._lanes(x, found, "x")
        targets = sources
        if out is not None:
            targets = self._lanes(out, found, "out")
            for place, (source, target) in enumerate(zip(sources, targets)):
                if check_out(target, source, source.tensor.shape):
                    sources[place] = target
            for (number, source), (other, target) in product(enumerate(sources), enumerate(targets)):
                if number != other:
                    self._check_disjoint(number, source, other, target)
        names = _name(algorithm, "algorithm"), _name(order, "order")
        for target in targets:
            check_writable(target, "x" if out is None else "out")
        prepared = self._prepare("all_reduce", sources, None, found, *names, wire=wire_dtype)
        jobs = [_reduced(prepared, source, target) for source, target in zip(sources, targets)]
        return _scaled(_joined(jobs, x if out is None else out))

    def reduce_scatter(self, x: Any, op: Any, out: Any, wire_dtype: Any) -> Job:
        found = _one_lane(_op(op), "reduce_scatter")
        source = self._operand(x, "x")
        shape = tuple(source.tensor.shape)
        if not shape or shape[0] % self.world_size:
            size = f"shape {shape}" if shape else "no dimension"
            raise ValueError(f"x has {size}; reduce_scatter cuts dimension 0 into {self.world_size} equal parts")
        target = self._result(out, source, (shape[0] // self.world_size, *shape[1:]))
        prepared = self._prepare("reduce_scatter", [source], op=found, wire=wire_dtype)
        numel = target.tensor.numel()
        part = slice(self.rank * numel, (self.rank + 1) * numel)

        def store(flat: torch.Tensor) -> None:
            target.store(flat[part])

        return _scaled(Job(prepared, source.copy, store, target.array, array=source.array))

    def all_gather(self, x: Any, out: Any) -> Job:
        source = self._operand(x, "x")
        shape = tuple(source.tensor.shape) or (1,)
        target = self._result(out, source, (shape[0] * self.world_size, *shape[1:]))
        prepared = self._prepare("all_gather", [source], numel=target.tensor.numel())
        numel = source.tensor.numel()
        part = slice(self.rank * numel, (self.rank + 1) * numel)

        def load() -> torch.Tensor:
            flat = target.room()
            source.write_to(flat[part])
            return flat

        return Job(prepared, load, target.store, target.array, array=source.array)

    def broadcast(self, x: Any, root: Any) -> Job:
        source = self._operand(x, "x")
        prepared = self._prepare("broadcast", [source], root=self._root(root))
        if not prepared.writes:
            return Job(prepared, source.flat, _nothing, x, _owner(source), x)
        check_writable(source, "x")
        return _in_place(prepared, source)

    def reduce(self, x: Any, op: Any, root: Any, wire_dtype: Any) -> Job:
        found = _op(op)
        sources = self._lanes(x, found, "x")
        prepared = self._prepare("reduce", sources, op=found, root=self._root(root), wire=wire_dtype)
        if self.rank == root:
            for source in sources:
                check_writable(source, "x")
            return _scaled(_joined([_in_place(prepared, source) for source in sources], x))
        jobs = []
        for source in sources:
            load = source.copy if prepared.writes else source.flat
            owner = None if prepared.writes else _owner(source)
            jobs.append(Job(prepared, load, _nothing, x, owner, source.array))
        return _scaled(_joined(jobs, x))

    def barrier(self) -> Job:
        plan = Plan(self.rank, self.world_size, 0, 1, (Buffer("data", 0),), (), (), 16)
        schedule = Schedule(find_algorithm("broadcast"), self.world_size)
        device = self._runtime.device if self._runtime else torch.device("cpu")
        engine = self._planner.engine(device)
        choice = Choice("barrier", "barrier", None, 16, 0, self._transport.name, engine.launcher.name)
        header = ("barrier", "barrier", "none", "uint8", (0,), 0, 16, 1)
        prepared = Prepared(schedule, plan, None, engine, choice, False, header)
        return Job(prepared, lambda: torch.empty(0, dtype=torch.uint8, device=device), _nothing, None)

    def _operand(self, array: Any, name: str) -> Operand:
        operand = operand_of(array, name, self._runtime)
        check_tensor(operand, name, self._transport.device_types, self._transport.name)
        if self._runtime and operand.tensor.device != self._runtime.device:
            raise ValueError(
                f"{name} is on device {operand.tensor.device}; this rank works on {self._runtime.device}: pass tensors "
                f"that are there, or call torch.cuda.set_device({self._runtime.device.index}) before you make them"
            )
        return operand

    def _lanes(self, arrays: Any, op: ReduceOp, name: str) -> list[Operand]:
        """The operands of a reduction: one, or one for each lane of the operator."""
        is_group = isinstance(arrays, (tuple, list))
        if not op.lanes:
            if is_group:
                kind = type(arrays).__name__
                raise TypeError(f"{name} is a {kind}, and operator {op.name!r} reduces one: call it for each tensor")
            return [self._operand(arrays, name)]
        wanted = f"operator {op.name!r} reduces {op.num_lanes} tensors ({', '.join(each.name for each in op.lanes)})"
        if not is_group:
            raise TypeError(f"{wanted} in lockstep: pass a tuple of them as {name}, not {type(arrays).__name__}")
        if len(arrays) != op.num_lanes:
            raise ValueError(f"{wanted}, got {len(arrays)} as {name}")
        operands = [self._operand(each, f"{name}[{number}]") for number, each in enumerate(arrays)]
        devices = {each.tensor.device for each in operands}
        if len(devices) > 1:
            raise ValueError(f"{name} is on devices {', '.join(sorted(map(str, devices)))}; the lanes must be on one")
        for (number, one), (other, another) in combinations(enumerate(operands), 2):
            self._check_disjoint(number, one, other, another)
        return operands

    @staticmethod
    def _check_disjoint(number: int, one: Operand, other: int, another: Operand) -> None:
        """One lane's result must not land in another lane's memory."""
        if shares_memory(one.tensor, another.tensor):
            raise ValueError(f"lanes {number} and {other} share memory; pass tensors of their own")

    def _result(self, out: Any, source: Operand, shape: tuple[int, ...]) -> Operand:
        if out is None:
            return new_like(source, shape, self._runtime)
        target = self._operand(out, "out")
        check_out(target, source, shape)
        check_writable(target, "out")
        return target

    def _prepare(
        self,
        collective: Collective,
        sources: Sequence[Operand],
        numel: int | None = None,
        op: ReduceOp | None = None,
        algorithm: str | None = None,
        order: str | None = None,
        root: int = 0,
        wire: Any = None,
    ) -> Prepared:
        tensors = [each.tensor for each in sources]
        shape = tuple(tensors[0].shape)
        widths: tuple[int, ...] = (1,)
        if op is not None and op.lanes:
            shape = rows_of(op, tensors, "x")
            widths = lane_widths(op, tensors, shape)
        numel = math.prod(shape) if numel is None else numel
        dtypes, device = tuple([each.dtype for each in tensors]), tensors[0].device
        if wire is not None and not isinstance(wire, (str, torch.dtype)):
            raise TypeError(f"wire_dtype must be a torch dtype or the name of one, not {wire!r}")
        return self._planner.prepare(
            Signature(collective, shape, dtypes, device, numel, op, algorithm, order, root, widths, wire)
        )

    def _root(self, root: Any) -> int:
        if not isinstance(root, int) or isinstance(root, bool):
            raise TypeError(f"root must be an int, not {type(root).__name__}")
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not one of the {self.world_size} ranks (0 to {self.world_size - 1})")
        return root


def _op(op: Any) -> ReduceOp:
    """The operator; raises what ``get_op`` raises."""
    return get_op(op)


def _one_lane(op: ReduceOp, collective: str) -> ReduceOp:
    if op.lanes:
        raise ValueError(f"operator {op.name!r} reduces {op.num_lanes} tensors; {collective} takes one: use all_reduce")
    return op


def _name(value: Any, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{what} must be a str or None, not {value!r}")


def _owner(operand: Operand) -> torch.Tensor | None:
    array = operand.array
    return array if array is operand.tensor and operand.is_dense() else None


def _reduced(prepared: Prepared, source: Operand, target: Operand) -> Job:
    """The job of one lane; in place if ``target`` is ``source``."""
    return _in_place(prepared, target) if source is target else _out_of_place(prepared, source, target)


def _in_place(prepared: Prepared, target: Operand) -> Job:
    store = target.store if prepared.writes else _nothing
    return Job(prepared, target.flat, store, target.array, _owner(target), target.array)


def _out_of_place(prepared: Prepared, source: Operand, target: Operand) -> Job:
    def load() -> torch.Tensor:
        flat = target.room()
        source.write_to(flat)
        return flat

    return Job(prepared, load, target.store, target.array, _owner(target), source.array)


def _joined(jobs: Sequence[Job], result: Any) -> Job:
    """The jobs of all lanes as one."""
    if len(jobs) == 1:
        return jobs[0]

    def store(lanes: tuple[torch.Tensor, ...]) -> None:
        for job, flat in zip(jobs, lanes):
            job.store(flat)

    def load() -> Values:
        return tuple(_tensor(job.load()) for job in jobs)

    return Job(jobs[0].prepared, load, store, result, array=jobs[0].array)


def _scaled(job: Job) -> Job:
    """With an operator that scales, the contribution is scaled as it is loaded."""
    op = job.prepared.op
    if op is not None and op.scale is not None:
        load, launcher, spec = job.load, job.prepared.engine.launcher, CombineSpec(op, scale=op.scale)

        def load_scaled() -> Values:
            flat = load()
            launcher.combine(flat, [flat], spec)
            return flat

        job.load = load_scaled
    return job


def _tensor(values: Values) -> torch.Tensor:
    return values[0] if isinstance(values, tuple) else values


def _nothing(flat: torch.Tensor) -> None:
    return None

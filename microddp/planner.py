"""From a call to what runs it: the algorithm, the schedule, the plan, the engine. Everything is cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from microddp.engine import Engine
from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.schedule import Algorithm, Schedule, algorithm_names, find_algorithm
from microddp.schedule.registry import Collective
from microddp.staging import StagingPool
from microddp.transport.base import Header, Transport
from microddp.tuning import Slicing, choose_all_reduce, choose_slicing
from microddp_kernels.launchers import launcher_for
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["Choice", "Planner", "Prepared", "Signature"]

_KEPT = 128

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a collective ran with.

    Attributes:
        collective: "all_reduce", "broadcast" …
        algorithm: the name that the caller gave, or that was chosen by size and number of ranks.
        order: "rank" if contributions are combined from the left in rank order, else None.
        slice_nbytes: bytes of a full slice.
        num_slots: staging buffers that the slices alternate between.
        transport, launcher: what moved and what combined.
    """

    collective: str
    algorithm: str
    order: str | None
    slice_nbytes: int
    num_slots: int
    transport: str
    launcher: str


class Signature(NamedTuple):
    """What a call asks for. ``numel`` is the plan's: of the whole tensor in reduce_scatter and all_gather."""

    collective: Collective
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    op: str | ReduceOp | None = None
    algorithm: str | None = None
    order: str | None = None
    root: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call ready to run, but for its tensors."""

    schedule: Schedule
    plan: Plan
    op: ReduceOp | None
    engine: Engine
    choice: Choice
    writes: bool
    header: tuple[Any, ...]

    def header_of(self, sequence: int) -> Header:
        """What the ranks must agree on in collective number ``sequence``."""
        return Header(sequence, *self.header)


class Planner:
    """Prepares the calls of one rank.

    Raises:
        ValueError: ``slice_nbytes`` or ``num_slots`` make no sense.
    """

    def __init__(
        self, transport: Transport, *, slice_nbytes: int | None, num_slots: int | None, launcher: str | None
    ) -> None:
        LoweringConfig(16 if slice_nbytes is None else slice_nbytes, 2 if num_slots is None else num_slots)
        self.transport = transport
        self.pool = StagingPool()
        self._slice_nbytes, self._num_slots, self._launcher = slice_nbytes, num_slots, launcher
        self._engines: dict[torch.device, Engine] = {}
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()

    def prepare(self, call: Signature) -> Prepared:
        """The plan for a call and what else it needs.

        Raises:
            ValueError: unknown op, algorithm or order; an algorithm that does not keep the operator's laws.
            TypeError: the op is not defined on the dtype.
            ScheduleError: the algorithm, a user's, is wrong.
        """
        found = self._prepared.get(call)
        if found is not None and self._is_current(found, call):
            self._prepared.move_to_end(call)
            return found
        prepared = self._prepare(call)
        _keep(self._prepared, call, prepared)
        return prepared

    def engine(self, device: torch.device) -> Engine:
        """The engine for tensors of ``device``."""
        found = self._engines.get(device)
        if found is None:
            found = self._engines[device] = Engine(self.transport, launcher_for(device, self._launcher), self.pool)
        return found

    def clear(self) -> None:
        """Forgets plans and views and lets go of the staging memory."""
        self._prepared.clear()
        self._plans.clear()
        for engine in self._engines.values():
            engine.clear()
        self.pool.release()

    @staticmethod
    def _is_current(prepared: Prepared, call: Signature) -> bool:
        """Whether the name still means the algorithm that was prepared: a user may register it anew."""
        entry = prepared.schedule.entry
        return find_algorithm(entry.name, collective=call.collective, order=call.order) is entry

    def _prepare(self, call: Signature) -> Prepared:
        op = None if call.op is None else get_op(call.op)
        if op is not None:
            op.check_dtype(call.dtype)
        world_size, itemsize = self.transport.world_size, call.dtype.itemsize
        entry = _choose(call, op, call.numel * itemsize, world_size)
        schedule = Schedule(entry, world_size, call.root)
        _check_proof(schedule)
        slicing = self._slicing(-(-call.numel * itemsize // schedule.num_chunks))
        config = LoweringConfig(
            slicing.slice_nbytes,
            slicing.num_slots,
            fuse=self.transport.fuses_combine,
            wide=op is not None and op.accumulation_dtype(call.dtype) != call.dtype,
            divides=op is not None and op.divides,
            means=op is not None and op.travels_as_mean(call.dtype),
        )
        plan = self._plan(schedule, call.numel, itemsize, config)
        engine = self.engine(call.device)
        order = "rank" if entry.rank_order else None
        choice = Choice(
            call.collective,
            entry.name,
            order,
            config.slice_nbytes,
            config.num_slots,
            self.transport.name,
            engine.launcher.name,
        )
        label = entry.name if entry is find_algorithm(entry.name) else f"{entry.name} in rank order"
        dtype = str(call.dtype).removeprefix("torch.")
        op_name = op.name if op is not None else "none"
        header = (call.collective, label, op_name, dtype, call.shape, call.root, config.slice_nbytes)
        return Prepared(schedule, plan, op, engine, choice, plan.writes_data, header)

    def _slicing(self, chunk_nbytes: int) -> Slicing:
        chosen = choose_slicing(chunk_nbytes, self.transport.world_size)
        return Slicing(self._slice_nbytes or chosen.slice_nbytes, self._num_slots or chosen.num_slots)

    def _plan(self, schedule: Schedule, numel: int, itemsize: int, config: LoweringConfig) -> Plan:
        key = (schedule, numel, itemsize, config)
        plan = self._plans.get(key)
        if plan is None:
            plan = lower(schedule, self.transport.rank, numel, itemsize, config)
            if not self.transport.stream_ordered:
                plan = hoist(plan)
            _keep(self._plans, key, plan)
        return plan


def _choose(call: Signature, op: ReduceOp | None, nbytes: int, world_size: int) -> Algorithm:
    if call.collective != "all_reduce":
        entry = find_algorithm(call.collective, collective=call.collective)
    else:
        in_order = op is not None and not (op.commutative and op.associative)
        name = call.algorithm
        if name is None:
            name = choose_all_reduce(nbytes, world_size, order=call.order, commutative=not in_order)
        entry = find_algorithm(name, collective="all_reduce", order=call.order)
    if op is not None:
        _check_laws(op, entry)
    return entry


def _check_laws(op: ReduceOp, entry: Algorithm) -> None:
    """An operator that does not commute, or is not associative, has a meaning only as a left fold in rank order."""
    if entry.rank_order or (op.commutative and op.associative):
        return
    law = "commutative" if not op.commutative else "associative"
    names = [name for name in algorithm_names("all_reduce") if find_algorithm(name).rank_order]
    ordered = [name for name in algorithm_names("all_reduce") if name not in names and _has_rank_order(name)]
    legal = ", ".join([*names, *(f"{name} with order='rank'" for name in ordered)])
    raise ValueError(
        f"operator {op.name!r} is not {law}, and {entry.name} does not combine in rank order; all_reduce by: {legal}"
    )


def _has_rank_order(name: str) -> bool:
    try:
        return find_algorithm(name, order="rank").rank_order
    except ValueError:
        return False


def _check_proof(schedule: Schedule) -> None:
    """Proves what a user has added before it runs; the library's own are proved by its tests."""
    if not schedule.entry.steps.__module__.startswith("microddp.schedule."):
        _prove(schedule)


@lru_cache(maxsize=_KEPT)
def _prove(schedule: Schedule) -> None:
    schedule.verify()


def _keep(cache: OrderedDict[Hashable, Value], key: Hashable, value: Value) -> None:
    cache[key] = value
    if len(cache) > _KEPT:
        cache.popitem(last=False)

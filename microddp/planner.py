"""From a call to what runs it: the algorithm, the schedule, the plan, the engine. Everything is cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from microddp.choosing import choose
from microddp.engine import Engine
from microddp.lanes import lane_types, row_nbytes_of, slice_of, types_text, unit_of, wire_dtype_of
from microddp.plan import LoweringConfig, Plan, hoist, lower
from microddp.schedule import Schedule, find_algorithm
from microddp.schedule.registry import Collective, registry_generation
from microddp.staging import LaneTypes, StagingPool
from microddp.stream_engine import StreamEngine
from microddp.transport.base import Header, Transport
from microddp.transport.stream import StreamTransport
from microddp.tuning import Slicing, choose_device_slicing, choose_slicing
from microddp_kernels.launchers import launcher_for
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
    """What a call asks for. ``numel`` is the plan's: of the whole tensor in reduce_scatter and all_gather.

    ``dtypes`` and ``widths`` have an item for each lane; ``shape`` and ``numel`` are those of the narrow ones.
    """

    collective: Collective
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    numel: int
    op: ReduceOp | None = None
    algorithm: str | None = None
    order: str | None = None
    root: int = 0
    widths: tuple[int, ...] = (1,)
    wire: torch.dtype | str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call ready to run, but for its tensors."""

    schedule: Schedule
    plan: Plan
    op: ReduceOp | None
    engine: Engine | StreamEngine
    choice: Choice
    writes: bool
    header: tuple[Any, ...]
    types: tuple[LaneTypes, ...] | None = None
    generation: int = -1

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
        self._engines: dict[torch.device, Engine | StreamEngine] = {}
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()

    def prepare(self, call: Signature) -> Prepared:
        """The plan for a call and what else it needs.

        Raises:
            ValueError: unknown op, algorithm or order; an algorithm that does not keep the operator's laws.
            TypeError: the op is not defined on the dtype, or cannot be run; a wire_dtype that makes no sense.
            ScheduleError: the algorithm, a user's, is wrong.
        """
        found = self._prepared.get(call)
        generation = registry_generation()  # a user may register an algorithm anew
        if found is not None and found.generation == generation:
            self._prepared.move_to_end(call)
            return found
        prepared = self._prepare(call, generation)
        _keep(self._prepared, call, prepared)
        return prepared

    def engine(self, device: torch.device) -> Engine | StreamEngine:
        """The engine for tensors of ``device``."""
        found = self._engines.get(device)
        if found is None:
            launcher = launcher_for(device, self._launcher)
            if isinstance(self.transport, StreamTransport):
                found = StreamEngine(self.transport, launcher, self.pool)
            else:
                found = Engine(self.transport, launcher, self.pool)
            self._engines[device] = found
        return found

    def clear(self) -> None:
        """Forgets plans and views and lets go of the staging memory."""
        self._prepared.clear()
        self._plans.clear()
        for engine in self._engines.values():
            engine.clear()
        self.pool.release()

    def _prepare(self, call: Signature, generation: int) -> Prepared:
        op, wire = call.op, None
        if op is not None:
            for lane, dtype in enumerate(call.dtypes):
                op.check_dtype(dtype, lane)
            wire = wire_dtype_of(call.wire, op, call.dtypes)
        types = lane_types(op, call.dtypes, call.widths, wire)
        nbytes = call.numel * row_nbytes_of(types)
        entry = choose(call.collective, call.algorithm, call.order, op, nbytes)
        schedule = Schedule(entry, self.transport.world_size, call.root)
        _check_proof(schedule)
        slicing = self._slicing(-(-nbytes // schedule.num_chunks))
        unit_nbytes, slice_nbytes = slice_of(types, slicing.slice_nbytes)
        config = self._config(op, types, unit_nbytes, slicing.num_slots)
        plan = self._plan(schedule, call.numel, unit_of(types), config)
        engine = self.engine(call.device)
        if op is not None and op.eager is None and self.transport.world_size > 1:
            engine.launcher.rehearse(op, call.dtypes, call.device)
        order = "rank" if entry.rank_order else None
        where = self.transport.name, engine.launcher.name
        choice = Choice(call.collective, entry.name, order, slice_nbytes, slicing.num_slots, *where)
        label = entry.name if entry is find_algorithm(entry.name) else f"{entry.name} in rank order"
        text, row_nbytes = types_text(types), row_nbytes_of(types)
        header = (call.collective, label, _label(op), text, call.shape, call.root, slice_nbytes, row_nbytes)
        writes = plan.writes_data or (op is not None and op.scale is not None)
        return Prepared(schedule, plan, op, engine, choice, writes, header, types, generation)

    def _config(
        self, op: ReduceOp | None, types: tuple[LaneTypes, ...], slice_nbytes: int, num_slots: int
    ) -> LoweringConfig:
        return LoweringConfig(
            slice_nbytes,
            num_slots,
            fuse=self.transport.fuses_combine and len(types) == 1,
            wide=any(each.wide != each.wire for each in types),
            divides=op is not None and op.finishes,
            means=op is not None and op.travels_as_mean(types[0].wire),
            wire=any(each.wire != each.data for each in types),
            alone=op is not None and op.finalize is not None,
        )

    def _slicing(self, chunk_nbytes: int) -> Slicing:
        chosen = (choose_device_slicing if self.transport.stream_ordered else choose_slicing)(chunk_nbytes)
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


def _label(op: ReduceOp | None) -> str:
    """What tells operators apart on different ranks: the name, and of a user's the fingerprint too."""
    if op is None:
        return "none"
    return f"{op.name} ({op.fingerprint})" if op.fingerprint else op.name


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

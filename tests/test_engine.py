"""The engine: what it waits for before it starts something, its views, its errors, and streams."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from microddp.plan.dependencies import ancestors
from microddp.plan.instructions import Plan, is_transfer
from microddp.plan.issue import host_issues
from microddp.staging import LaneTypes
from microddp.transport.base import Exchange, Header, Transfer, Transport
from microddp.transport.thread import ThreadTransport, run_thread_ranks
from microddp_kernels.launchers import launcher_for
from microddp_kernels.reduce_op import CombineSpec
from tests.engine_tools import CPU, Stream, StreamLauncher, StreamTransport, await_all, make_engine, make_plan, run_sum

ALL_REDUCES = (
    ("naive", None),
    ("tree", None),
    ("ring", None),
    ("full_ring", None),
    ("full_ring", "rank"),
    ("direct", None),
)
pytestmark = pytest.mark.timeout(60)


def digits(rank: int, numel: int) -> torch.Tensor:
    """Small integers whose sum over the ranks shows a rank that is missing or counted twice."""
    return (torch.arange(numel, dtype=torch.float32) % 5 + 1) * 10.0**rank


def total(world_size: int, numel: int) -> torch.Tensor:
    return (torch.arange(numel, dtype=torch.float64) % 5 + 1) * sum(10.0**rank for rank in range(world_size))


class _NoTransport(Transport):
    """Records each post and each wait; every transfer is complete once it has been waited for."""

    name = "none"

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.aborted: BaseException | None = None

    def open(self, header: Header, deadline: float) -> Exchange:
        return _Recorder(self)

    def reject(self, sequence: int, error: BaseException) -> None: ...

    def abort(self, error: BaseException) -> None:
        self.aborted = error

    def close(self) -> None: ...


class _Recorder(Exchange):
    def __init__(self, transport: _NoTransport) -> None:
        self._log, self._posted = transport.log, 0

    def post(self, group: Sequence[Transfer], after: Sequence[Any] = ()) -> Sequence[int]:
        events = tuple(range(self._posted, self._posted + len(group)))
        self._posted += len(group)
        self._log.append(("post", events))
        return events

    def wait(self, events: Sequence[int], queue: Any = None) -> None:
        self._log.append(("wait", tuple(events)))

    def finish(self) -> None: ...


@pytest.mark.parametrize(("name", "order"), ALL_REDUCES)
def test_everything_that_an_instruction_depends_on_is_awaited_before_it(name: str, order: str | None) -> None:
    for rank in range(4):
        plan = make_plan(name, rank, 4, 101, order=order)
        transport = _NoTransport(rank, 4)
        run_sum(make_engine(transport), plan, torch.ones(101))
        before = ancestors(plan.after)
        transfers = [index for index, each in enumerate(plan.instructions) if is_transfer(each)]
        awaited: set[int] = set()
        log = iter(transport.log)
        for issue in host_issues(plan):
            if issue.waits:
                kind, events = next(log)
                assert kind == "wait"
                awaited |= {transfers[event] for event in events}
            if issue.is_post:
                assert next(log)[0] == "post"
            for index in issue.indices:
                needed = {each for each in transfers if before[index] >> each & 1}
                assert needed <= awaited, f"{plan.instructions[index]} starts before {needed - awaited}"


@pytest.mark.parametrize(("name", "order"), ALL_REDUCES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_streams_get_the_same_sums_by_events_alone(name: str, order: str | None, world_size: int) -> None:
    numel = 103

    def body(host: ThreadTransport) -> torch.Tensor:
        transport = StreamTransport(host)
        kernels = Stream()
        engine = make_engine(transport, StreamLauncher())
        data = digits(host.rank, numel)
        plan = make_plan(name, host.rank, world_size, numel, order=order, is_hoisted=False)
        run_sum(engine, plan, data, queue=kernels)
        await_all([kernels.put(lambda: None), transport.stream.put(lambda: None)])
        assert transport.stream.error is None and kernels.error is None
        for group in transport.groups:
            assert len({step for step, _ in group}) == 1
        transport.close()
        kernels.close()
        return data

    for data in run_thread_ranks(body, world_size):
        assert torch.equal(data.double(), total(world_size, numel))


@pytest.mark.parametrize(("name", "order"), ALL_REDUCES)
def test_streams_convert_to_the_wire_type_and_move_all_lanes(name: str, order: str | None) -> None:
    """With the events alone, as above: a sum that travels as float64, and argmax over values and indices."""
    world_size, numel = 3, 103
    float32, float64, int64 = torch.float32, torch.float64, torch.int64
    as_float64 = (LaneTypes(float32, float64, float64),)
    as_they_are = (LaneTypes(float32, float32, float32), LaneTypes(int64, int64, int64))

    def body(host: ThreadTransport) -> tuple[torch.Tensor, ...]:
        transport, kernels = StreamTransport(host), Stream()
        engine = make_engine(transport, StreamLauncher())
        data = digits(host.rank, numel)
        values = torch.from_numpy(np.random.default_rng(host.rank).integers(0, 5, numel)).float()
        indices = torch.full((numel,), host.rank)
        plan = make_plan(name, host.rank, world_size, numel, order=order, is_hoisted=False, wire=True)
        run_sum(engine, plan, data, 0, types=as_float64, queue=kernels)
        await_all([kernels.put(lambda: None), transport.stream.put(lambda: None)])  # staging is poisoned from the host
        run_sum(engine, plan_of_lanes(host.rank), (values, indices), 1, types=as_they_are, queue=kernels, op="argmax")
        await_all([kernels.put(lambda: None), transport.stream.put(lambda: None)])
        assert transport.stream.error is None and kernels.error is None
        transport.close()
        kernels.close()
        return data, values, indices

    def plan_of_lanes(rank: int) -> Plan:
        return make_plan(name, rank, world_size, numel, order=order, is_hoisted=False)

    contributions = [np.random.default_rng(rank).integers(0, 5, numel) for rank in range(world_size)]
    for data, values, indices in run_thread_ranks(body, world_size):
        assert torch.equal(data.double(), total(world_size, numel))
        assert indices.tolist() == np.argmax(contributions, axis=0).tolist()
        assert values.tolist() == np.max(contributions, axis=0).tolist()


def test_views_are_kept_while_the_tensor_lives_and_made_anew_when_it_moves() -> None:
    plan = make_plan("ring", 0, 2, 64)
    engine = make_engine(_NoTransport(0, 2))
    data = torch.ones(64)
    run_sum(engine, plan, data, owner=data)
    first = engine._programs[data][id(plan)]
    run_sum(engine, plan, data, 1, owner=data)
    assert engine._programs[data][id(plan)] is first
    data.data = torch.ones(64)
    run_sum(engine, plan, data, 2, owner=data)
    assert engine._programs[data][id(plan)] is not first
    storage = weakref.ref(data.untyped_storage())
    del data, first
    gc.collect()
    assert len(engine._programs) == 0
    assert storage() is None, "the engine keeps the memory of a tensor that is gone"


def test_views_of_replaced_staging_are_dropped() -> None:
    engine = make_engine(_NoTransport(0, 2))
    small, large = torch.ones(8), torch.ones(4096)
    run_sum(engine, make_plan("ring", 0, 2, 8), small, owner=small)
    block = weakref.ref(next(iter(engine.pool._blocks.values())).untyped_storage())
    run_sum(engine, make_plan("ring", 0, 2, 4096, slice_nbytes=8192), large, owner=large)
    gc.collect()
    assert block() is None, "a kept view holds the old staging memory"
    assert small not in engine._programs


def test_without_an_owner_nothing_is_kept() -> None:
    engine = make_engine(_NoTransport(0, 2))
    run_sum(engine, make_plan("ring", 0, 2, 64), torch.ones(64))
    assert len(engine._programs) == 0


class _Failing:
    """A launcher whose third combine raises."""

    name = "failing"

    def __init__(self) -> None:
        self._eager, self._calls = launcher_for(CPU), 0

    def combine(self, out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, queue: Any = None) -> None:
        self._calls += 1
        if self._calls == 3:
            raise ArithmeticError("third combine")
        self._eager.combine(out, operands, how)

    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Any = None) -> None:
        self._eager.copy(out, source)


def test_a_launcher_that_fails_aborts_the_transport() -> None:
    transport = _NoTransport(0, 4)
    with pytest.raises(ArithmeticError, match="third combine"):
        run_sum(make_engine(transport, _Failing()), make_plan("ring", 0, 4, 64), torch.ones(64))  # type: ignore[arg-type]
    assert isinstance(transport.aborted, ArithmeticError)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("name", "order"), ALL_REDUCES)
def test_fused_and_unfused_plans_give_the_same_sums(name: str, order: str | None, fuse: bool) -> None:
    def body(transport: ThreadTransport) -> torch.Tensor:
        data = digits(transport.rank, 97)
        plan = make_plan(name, transport.rank, 4, 97, order=order, fuse=fuse)
        run_sum(make_engine(transport), plan, data, owner=data)
        return data

    for data in run_thread_ranks(body, 4):
        assert torch.equal(data.double(), total(4, 97))

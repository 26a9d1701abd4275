"""The engine: what it waits for before it starts something, its views and its errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from microddp.plan.dependencies import ancestors
from microddp.plan.instructions import is_transfer
from microddp.plan.issue import host_issues
from microddp.transport.base import Exchange, Header, Transfer, Transport
from microddp.transport.thread import ThreadTransport, run_thread_ranks
from microddp_kernels.launchers import launcher_for
from microddp_kernels.reduce_op import CombineSpec
from tests.engine_tools import CPU, make_engine, make_plan, run_sum

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

    def post(self, group: Sequence[Transfer]) -> Sequence[int]:
        events = tuple(range(self._posted, self._posted + len(group)))
        self._posted += len(group)
        self._log.append(("post", events))
        return events

    def wait(self, events: Sequence[int]) -> None:
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


def test_views_are_kept_while_the_tensor_lives_and_made_anew_when_it_moves() -> None:
    plan = make_plan("ring", 0, 2, 64)
    engine = make_engine(_NoTransport(0, 2))
    data = torch.ones(64)
    run_sum(engine, plan, data, owner=data)
    first = engine.programs.kept(data)[id(plan)]
    run_sum(engine, plan, data, 1, owner=data)
    assert engine.programs.kept(data)[id(plan)] is first
    data.data = torch.ones(64)
    run_sum(engine, plan, data, 2, owner=data)
    assert engine.programs.kept(data)[id(plan)] is not first
    storage = weakref.ref(data.untyped_storage())
    del data, first
    gc.collect()
    assert len(engine.programs) == 0
    assert storage() is None, "the engine keeps the memory of a tensor that is gone"


def test_views_of_replaced_staging_are_dropped() -> None:
    engine = make_engine(_NoTransport(0, 2))
    small, large = torch.ones(8), torch.ones(4096)
    run_sum(engine, make_plan("ring", 0, 2, 8), small, owner=small)
    block = weakref.ref(next(iter(engine.pool._blocks.values())).untyped_storage())
    run_sum(engine, make_plan("ring", 0, 2, 4096, slice_nbytes=8192), large, owner=large)
    gc.collect()
    assert block() is None, "a kept view holds the old staging memory"
    assert not engine.programs.kept(small)


def test_without_an_owner_nothing_is_kept() -> None:
    engine = make_engine(_NoTransport(0, 2))
    run_sum(engine, make_plan("ring", 0, 2, 64), torch.ones(64))
    assert len(engine.programs) == 0


class _Failing:
    """A launcher whose third combine raises."""

    name = "failing"

    def __init__(self) -> None:
        self._eager, self._calls = launcher_for(CPU), 0

    def combine(self, out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec) -> None:
        self._calls += 1
        if self._calls == 3:
            raise ArithmeticError("third combine")
        self._eager.combine(out, operands, how)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
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

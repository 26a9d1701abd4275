"""Faults between the NCCL transport and CuPy's bindings are found by name; without them its calls keep NCCL's rules."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from microddp import Communicator
from microddp.errors import ClosedError, CollectiveTimeoutError, MicroddpError, TransportError
from microddp.plan.streams import stream_program
from microddp.transport import nccl_setup
from microddp.transport.nccl import NcclTransport
from tests.matrix import ROWS
from tests.nccl.injected_tools import Failing, Meeting, Recorders, groups_of, labelled_transfers
from tests.nccl.model_calls import Deadlock, Recv, Send, Verdict
from tests.nccl.model_faults import SwappedGroups, UngroupedStep, WrongCount, WrongPeer
from tests.nccl.ranks_tools import Ranks, on_ranks, quick_switches, with_comms
from tests.nccl.standin_runtime import StandInRuntime
from tests.transport.contract_tools import DTYPES, exchange, message, neighbours, poison, recv, same_bytes, send

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]

ALGORITHMS = ("naive", "tree", "ring", "full_ring", "direct")
NUMEL = 60  # float64: several slices of 32 bytes in each chunk
FOUND_WITHIN_S = 2.0

Stream = partial(StandInRuntime, blocking=False)


def inject(
    world_size: int, fault: Callable[[Any, int], Any], algorithm: str, *, aborts: bool = True
) -> tuple[Verdict, Ranks, Recorders]:
    """Runs all-reduces unharmed, so that all ranks are connected, then one with the fault, and judges all its calls.

    The devices come to it only after that. Then rank 0 aborts, or, without ``aborts``, everybody waits for the end.
    """
    recorders, meet, gate = Recorders(world_size, fault), Meeting(world_size), threading.Event()
    verdicts: list[Verdict] = []

    def body(transport: NcclTransport) -> str:
        comm = Communicator(transport, slice_nbytes=32, timeout=20)
        for warm in ("direct", algorithm):
            comm.all_reduce(torch.ones(NUMEL, dtype=torch.float64), algorithm=warm)
        comm.synchronize()
        meet()
        recorders.arm(comm.rank)
        transport.runtime.launch(transport.runtime.caller_stream(), lambda: gate.wait(20))
        meet()
        text = attempt(lambda: comm.all_reduce(torch.ones(NUMEL, dtype=torch.float64), algorithm=algorithm))
        meet()
        if comm.rank == 0:
            verdicts.append(recorders.verdict())
            if aborts:
                comm._calls.abort(RuntimeError("the model says: " + " ".join(sorted(verdicts[0].names))))
            gate.set()
        return text or attempt(comm.synchronize)

    with quick_switches(), labelled_transfers():
        ranks = on_ranks(world_size, body, make_runtime=Stream, make_api=recorders.api)
    ranks.checked()
    assert ranks.seconds < FOUND_WITHIN_S, ranks.seconds
    assert all(each is recorders.each[rank] or each.struck for rank, each in enumerate(recorders.faults))
    return verdicts[0], ranks, recorders


def attempt(call: Callable[[], object]) -> str:
    """The text of what it raises, if that is no time-out."""
    try:
        call()
    except CollectiveTimeoutError:
        raise
    except MicroddpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_rank(odd: int | None, make: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """A fault on one rank, or on all."""
    return lambda recorder, rank: make(recorder) if odd in (None, rank) else recorder


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_whose_steps_are_not_grouped_is_a_deadlock(world_size: int) -> None:
    fault = on_rank(None, lambda recorder: UngroupedStep(recorder, 1, armed=False))
    verdict, ranks, _ = inject(world_size, fault, "ring")
    assert verdict.names == {"Deadlock", "Ungrouped"}
    (cycle,) = (each for each in verdict if isinstance(each, Deadlock))
    assert sorted(cycle.ranks) == list(range(world_size))
    assert all("the model says: Deadlock Ungrouped" in text for text in ranks.results), ranks.results


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_ungrouped_step_of_one_rank_is_named(algorithm: str) -> None:
    """Whether it hurts or not: of one rank alone it need not."""
    verdict, _, _ = inject(3, on_rank(1, lambda recorder: UngroupedStep(recorder, 1, armed=False)), algorithm)
    assert verdict.names == {"Ungrouped"}
    assert {each.place.rank for each in verdict} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_swapped_group_order_is_named(algorithm: str) -> None:
    """Where sizes agree nothing but what arrives is wrong, which neither NCCL nor the stand-in can know."""
    verdict, _, _ = inject(3, on_rank(1, lambda recorder: SwappedGroups(recorder, 0, armed=False)), algorithm)
    # Rank 1 of the star sends first, and then receives what comes of it.
    assert verdict.names == {"Deadlock" if algorithm == "naive" else "GroupOrder"}
    assert all("rank 1" in str(each) for each in verdict)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wrong_peer_is_named(algorithm: str, world_size: int) -> None:
    """Of two ranks the only wrong peer is the rank itself, which NCCL refuses by itself."""
    fault = on_rank(1, lambda recorder: WrongPeer(recorder, 0, armed=False))
    verdict, ranks, _ = inject(world_size, fault, algorithm, aborts=world_size > 2)
    assert "Unmatched" in verdict.names and not verdict.completes
    assert any("rank 1 send" in str(each) for each in verdict if each.name == "Unmatched")
    named = "Unmatched" if world_size > 2 else "NCCL result 5: invalid use of the library"
    assert all(named in text for text in ranks.results), ranks.results


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wrong_byte_count_is_named_by_the_model_and_by_the_standin(algorithm: str) -> None:
    """Nobody aborts here: the stand-in's own check ends it, as ncclInvalidUsage, and the watchdogs tell all ranks."""
    fault = on_rank(1, lambda recorder: WrongCount(recorder, 0, armed=False))
    verdict, ranks, _ = inject(3, fault, algorithm, aborts=False)
    assert verdict.names == {"CountMismatch"}
    (problem,) = verdict
    number = r"\(call \d+\) of \d+ bytes"
    assert re.fullmatch(rf"rank 1 send→(\d) {number} meets rank \1 recv←1 {number}", str(problem))
    assert all("NCCL result 5: invalid use of the library" in text for text in ranks.results), ranks.results


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("row", ROWS)
def test_without_a_fault_nothing_is_named(row: str, world_size: int) -> None:
    """Every transfer in a group, no group empty or above 256, both ends of an edge in one order, sizes equal."""
    recorders = Recorders(world_size)

    def body(comm: Communicator) -> None:
        for numel, dtype in ((NUMEL, torch.float64), (7, torch.int8), (1, torch.float32), (0, torch.float32)):
            x = torch.full((numel,), comm.rank + 1, dtype=dtype)
            comm.all_reduce(x, algorithm=ROWS[row].algorithm, order=ROWS[row].order)
            assert x.tolist() == [sum(range(world_size + 1))] * numel

    with quick_switches(), labelled_transfers():
        with_comms(world_size, body, slice_nbytes=32, make_api=recorders.api).checked()
    assert recorders.verdict().problems == ()
    for program in recorders.programs:
        groups = groups_of(program)
        assert all(0 < len(group) <= 256 for group in groups)
        assert all(call.nbytes > 0 for group in groups for call in group if isinstance(call, (Send, Recv)))
        assert len({call.stream for group in groups for call in group if isinstance(call, (Send, Recv))}) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_step_is_one_group_of_a_send_and_a_receive(world_size: int) -> None:
    recorders = Recorders(world_size)

    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(16 * world_size), algorithm="ring")

    with labelled_transfers():
        with_comms(world_size, body, slice_nbytes=32, make_api=recorders.api).checked()
    for rank, program in enumerate(recorders.programs):
        _, *groups = groups_of(program)  # the first connects
        assert len(groups) == 2 * (world_size - 1) * 2  # chunks of two slices
        labels = [{call.label[:2] for call in group} for group in groups]  # type: ignore[union-attr, index]
        assert labels == [{(step, part)} for step in range(2 * (world_size - 1)) for part in range(2)]
        for group in groups:
            ends = sorted((type(call).__name__, call.peer, call.nbytes) for call in group)  # type: ignore[union-attr]
            left, right = (rank - 1) % world_size, (rank + 1) % world_size
            assert ends == [("Recv", left, 32), ("Send", right, 32)]


def test_leaves_of_a_tree_and_ranks_of_a_star_have_groups_of_one() -> None:
    recorders = Recorders(5)

    def body(comm: Communicator) -> None:
        for algorithm in ("tree", "naive"):
            comm.all_reduce(torch.ones(16), algorithm=algorithm)

    with labelled_transfers():
        with_comms(5, body, slice_nbytes=32, make_api=recorders.api).checked()
    for rank, program in enumerate(recorders.programs):
        groups = [group for group in groups_of(program) if all(getattr(call, "label", None) for call in group)]
        is_leaf = rank > 1
        assert len(groups) >= 4
        assert (all(len(group) == 1 for group in groups)) is is_leaf, rank


def test_groups_that_would_be_too_large_are_split_alike_on_both_ends() -> None:
    """256 transfers take 129 ranks: here it is four, for seven ranks and two lanes of an operator as well."""
    recorders = Recorders(7)

    def body(comm: Communicator) -> None:
        for algorithm in ("direct", "naive"):
            x = torch.full((NUMEL,), comm.rank + 1.0)
            assert comm.all_reduce(x, algorithm=algorithm).tolist() == [28.0] * NUMEL
        mine = torch.tensor([float(comm.rank), 6.0 - comm.rank]), torch.full((2,), comm.rank)
        comm.all_reduce(mine, "argmax", algorithm="direct")
        assert [each.tolist() for each in mine] == [[6.0, 6.0], [6, 0]]

    split = mock.patch("microddp.stream_engine.stream_program", partial(stream_program, max_group=4))
    with split, mock.patch.object(nccl_setup, "MAX_GROUP", 4), labelled_transfers(), quick_switches():
        with_comms(7, body, make_api=recorders.api).checked()
    assert recorders.verdict().problems == ()
    sizes = {len(group) for program in recorders.programs for group in groups_of(program)}
    assert max(sizes) == 4


def nccl_error() -> Exception:
    from cupy.cuda import nccl

    return nccl.NcclError(3)  # type: ignore[no-any-return]


FAILURES: dict[str, tuple[Callable[[], Exception], bool, str]] = {
    # name: (the error, whether the end of the group raises it, what the text says)
    "send raises": (nccl_error, False, "NCCL result 3: NCCL failed internally"),
    "end raises": (nccl_error, True, "NCCL result 3: NCCL failed internally"),
    "in progress": (partial(KeyError, 7), True, "NCCL result 7: an operation is still in progress"),
    "timed out": (partial(KeyError, 8), False, "NCCL result 8: an operation timed out"),
    "foreign": (partial(ZeroDivisionError, "of another kind"), False, "of another kind"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_call_ends_its_group_and_reaches_every_rank(name: str) -> None:
    """The ring of four ranks fails on rank 1 in step 2, which sends to rank 2."""
    error, at_end, says = FAILURES[name]
    recorders = Recorders(4, on_rank(1, lambda recorder: Failing(recorder, 2, error, at_end=at_end)))
    meet = Meeting(4)

    def body(transport: NcclTransport) -> tuple[BaseException | None, str]:
        comm = Communicator(transport)
        comm.all_reduce(torch.ones(16), algorithm="ring")
        comm.synchronize()
        meet()
        recorders.arm(comm.rank)
        meet()
        caught: BaseException | None = None
        try:
            comm.all_reduce(torch.ones(16), algorithm="ring")
            comm.synchronize()
        except Exception as found:
            caught = found
        with pytest.raises(ClosedError) as later:
            comm.all_reduce(torch.ones(16), algorithm="ring")
        return caught, str(later.value)

    with labelled_transfers():
        ranks = on_ranks(4, body, make_runtime=Stream, make_api=recorders.api)
    for rank, (found, later) in enumerate(ranks.checked()):
        assert says in str(found) and says in later, (found, later)
        if rank != 1:
            assert isinstance(found, TransportError) and "rank 1" in str(found) and f"rank {rank} of 4" in str(found)
        elif name == "foreign":
            assert type(found) is ZeroDivisionError
        else:
            assert isinstance(found, TransportError) and not isinstance(found, CollectiveTimeoutError)
            where = "rank 1 of 4: all_reduce by ring, collective 1, step 2, sending to rank 2 and receiving from rank 0"
            assert where in str(found), found
    failing = recorders.faults[1]
    assert failing.struck and failing.starts == failing.ends > 0
    assert ranks.seconds < FOUND_WITHIN_S


def test_every_dtype_travels_as_its_bytes() -> None:
    """As NCCL_UINT8, whatever it is."""
    recorders, types, numel = Recorders(3), set[int](), 11

    def note(recorder: Any, kind: Any, count: int, dtype: int, peer: int, stream: int) -> None:
        types.add(dtype)
        original(recorder, kind, count, dtype, peer, stream)

    original = type(recorders.each[0]).note

    def body(transport: NcclTransport) -> None:
        left, right = neighbours(transport)
        for salt, dtype in enumerate(DTYPES):
            outgoing, incoming = message(transport.rank, right, salt, numel, dtype), poison(numel, dtype)
            recorders.each[transport.rank].clear()
            with exchange(transport) as opened:
                opened.wait(opened.post([send(right, outgoing), recv(left, incoming)]))
            assert same_bytes(incoming, message(left, transport.rank, salt, numel, dtype)), dtype
            *_, group = groups_of(recorders.each[transport.rank].program)  # the first call connects before it
            assert [call.nbytes for call in group] == [numel * dtype.itemsize] * 2  # type: ignore[union-attr]

    with mock.patch.object(type(recorders.each[0]), "note", note):
        on_ranks(3, body, make_api=recorders.api).checked()
    from cupy.cuda import nccl

    assert types == {nccl.NCCL_UINT8}

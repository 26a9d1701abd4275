"""The fake device: it plays every legal order and no other, and says who waits for whom when none is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from microddp.transport.base import Header, Kind, Transfer
from tests.nccl.fake_device import FakeRuntime, FakeStream, FakeWorld
from tests.nccl.fake_play import FakeDeadlockError, Player, Strategy, one_sided, ranked, shuffled

pytestmark = pytest.mark.timeout(30)

STRATEGIES = [shuffled, ranked, one_sided]


def send(peer: int, view: torch.Tensor) -> Transfer:
    return Transfer(Kind.SEND, peer, 0, view)


def recv(peer: int, view: torch.Tensor) -> Transfer:
    return Transfer(Kind.RECV, peer, 0, view)


class Device:
    """A world of one rank or more, and what its kernels were seen to do."""

    def __init__(self, world_size: int = 1) -> None:
        self.world = FakeWorld(world_size)
        self.transports = self.world.transports()
        self.runtimes = [each.runtime for each in self.transports]
        self.seen: list[str] = []

    def kernel(self, stream: FakeStream, name: str, call: Callable[[], object] = lambda: None) -> None:
        def run() -> None:
            self.seen.append(name)
            call()

        runtime = self.runtimes[stream.rank]
        with runtime.on(stream):
            runtime.launch(stream, run)

    def group(self, rank: int, *transfers: Transfer) -> None:
        self.runtimes[rank].enqueue_group(self.transports[rank].groups, transfers)

    def order(self, first: FakeStream, second: FakeStream) -> None:
        """Makes what comes on ``second`` start after what is on ``first``."""
        runtime = self.runtimes[first.rank]
        event = runtime.new_event()
        runtime.record(event, first)
        runtime.wait(second, event)

    def orders(self, num_plays: int = 300, strategy: Strategy = shuffled) -> Counter[str]:
        player, found = Player(self.world), Counter[str]()
        for seed in range(num_plays):
            self.seen.clear()
            player.play(seed, strategy)
            found["".join(self.seen)] += 1
        return found


def test_every_interleaving_of_two_streams_comes_up_and_each_stream_keeps_its_order() -> None:
    device = Device()
    first, second = (device.runtimes[0].new_stream() for _ in range(2))
    for name in "ab":
        device.kernel(first, name)
        device.kernel(second, name.upper())
    assert set(device.orders()) == {"abAB", "aAbB", "aABb", "AabB", "AaBb", "ABab"}
    assert set(device.orders(strategy=ranked)) == {"abAB", "ABab"}  # whoever is first goes on


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wait_keeps_to_the_order_of_its_event(strategy: Strategy) -> None:
    device = Device()
    first, second = (device.runtimes[0].new_stream() for _ in range(2))
    device.kernel(first, "a")
    device.order(first, second)
    device.kernel(first, "b")
    device.kernel(second, "A")
    found = device.orders(strategy=strategy)
    assert set(found) <= {"abA", "aAb"}
    assert strategy is not shuffled or len(found) == 2
    (wait,) = device.world.waits()
    without = Player(device.world).without([wait])
    device.seen.clear()
    for seed in range(50):
        without.play(seed)
    assert "Aab" in "".join(device.seen)


def test_a_wait_means_the_last_record_before_it_and_one_without_a_record_means_nothing() -> None:
    device = Device()
    runtime = device.runtimes[0]
    first, second = runtime.new_stream(), runtime.new_stream()
    event = runtime.new_event()
    runtime.wait(second, event)  # not recorded yet
    device.kernel(second, "A")
    device.kernel(first, "a")
    runtime.record(event, first)
    runtime.wait(second, event)
    device.kernel(first, "b")
    runtime.record(event, first)
    device.kernel(second, "B")
    found = device.orders()
    assert set(found) == {"AabB", "AaBb", "aAbB", "aABb", "abAB"}
    assert runtime.query(event)
    runtime.record(event, first)
    assert not runtime.query(event)  # not played since
    Player(device.world).play(0)
    assert runtime.query(event)


def test_bytes_move_at_any_moment_once_both_groups_have_started_and_each_transfer_by_itself() -> None:
    device = Device(2)
    sent, taken = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    free = device.runtimes[0].new_stream()
    device.kernel(free, "w", lambda: sent.fill_(7))
    device.group(0, send(1, sent[:1]), send(1, sent[1:]))
    device.group(1, recv(0, taken[:1]), recv(0, taken[1:]))
    found = set()
    player = Player(device.world)
    for seed in range(100):
        sent.zero_()
        player.play(seed)
        found.add(tuple(taken.tolist()))
    assert found == {(0, 0), (0, 7), (7, 0), (7, 7)}


def test_what_follows_a_group_starts_after_all_of_its_transfers() -> None:
    device = Device(2)
    words, taken = torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    seen = []
    device.group(0, *(send(1, words[each : each + 1]) for each in range(3)))
    device.group(1, *(recv(0, taken[each : each + 1]) for each in range(3)))
    device.kernel(device.transports[1].groups, "r", lambda: seen.append(taken.tolist()))
    device.kernel(device.transports[0].groups, "s", lambda: words.zero_())
    player = Player(device.world)
    for seed in range(50):
        words.fill_(1)
        taken.zero_()
        player.play(seed, STRATEGIES[seed % 3])
    assert seen == [[1, 1, 1]] * 50


def test_groups_of_a_rank_run_one_after_the_other_whatever_their_streams() -> None:
    device = Device(2)
    word = torch.tensor([1, 2], dtype=torch.int64)
    taken = torch.zeros(2, dtype=torch.int64)
    other = device.runtimes[0].new_stream()
    device.group(0, send(1, word[:1]))
    device.runtimes[0].enqueue_group(other, [send(1, word[1:])])
    device.kernel(other, "b", lambda: word.fill_(9))
    device.group(1, recv(0, taken[:1]), recv(0, taken[1:]))
    player = Player(device.world)
    for seed in range(50):
        word.copy_(torch.tensor([1, 2]))
        player.play(seed)
        assert taken.tolist() == [1, 2]
    device.kernel(device.transports[0].groups, "a")
    assert set(device.orders(50)) == {"ab", "ba"}


def test_a_deadlock_says_what_each_stream_waits_for() -> None:
    device = Device(2)
    words = torch.zeros(4, dtype=torch.int64)
    for rank in range(2):
        device.group(rank, send(1 - rank, words[:1]))
        device.group(rank, recv(1 - rank, words[rank + 1 : rank + 2]))
        device.order(device.transports[rank].groups, device.transports[rank].kernels)
    with pytest.raises(FakeDeadlockError) as caught:
        Player(device.world).play(0)
    assert "rank 0 groups, operation 0, waits for its send to rank 1 (whose group 1)" in str(caught.value)
    assert "rank 1 kernels, operation 0, waits for an event of rank 1 groups" in str(caught.value)


def test_ends_that_do_not_fit_are_told() -> None:
    device = Device(2)
    words = torch.zeros(4, dtype=torch.int64)
    device.group(0, send(1, words[:2]))
    with pytest.raises(FakeDeadlockError, match="send with rank 1, which never posts the other end"):
        Player(device.world).play(0)
    device.group(1, recv(0, words[:1]))
    with pytest.raises(ValueError, match="rank 0 sends 16 bytes, rank 1 takes 8"):
        Player(device.world)


def test_what_the_fake_cannot_do_is_refused() -> None:
    transport = FakeWorld(1).transports()[0]
    runtime: FakeRuntime = transport.runtime
    exchange = transport.open(Header(0, "all_reduce", "any", "sum", "float32", (1,), 0, 64), 0.0)
    with pytest.raises(RuntimeError, match="outside on"):
        runtime.launch(transport.kernels, lambda: None)
    with pytest.raises(TypeError, match="recv_combine"):
        exchange.enqueue([Transfer(Kind.RECV_COMBINE, 0, 0, torch.zeros(1), lambda view: None)])
    with pytest.raises(ValueError, match="no transfers"):
        exchange.enqueue([])
    for refused in (exchange.finish, lambda: exchange.post([]), lambda: exchange.wait([])):
        with pytest.raises(RuntimeError, match="the host cannot wait"):
            refused()
    done = runtime.new_event()
    runtime.record(done, transport.kernels)
    ticket = exchange.submit(done, None)
    with pytest.raises(TimeoutError):
        ticket.synchronize()
    Player(runtime.world).play(0)
    ticket.synchronize()
    assert ticket.done()

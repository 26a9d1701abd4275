"""The engine's program for streams gives the right result in every interleaving, and without a wait it does not.

A few hundred interleavings in the gate; ``MICRODDP_INTERLEAVINGS=10000`` asks for as many, and for every wait of every
program. What was tried is printed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from unittest import mock

import pytest

from tests.nccl.fake_play import Strategy, adversarial, one_sided, ranked, shuffled
from tests.nccl.interleavings_tools import ALGORITHMS, Case, NeededWait, Scenario

pytestmark = pytest.mark.timeout(300)

NUM_INTERLEAVINGS = int(os.environ.get("MICRODDP_INTERLEAVINGS", "300"))
IS_FULL = NUM_INTERLEAVINGS >= 10_000
WORLD_SIZES = (2, 3, 4, 5)
STRATEGIES: tuple[Strategy, ...] = (shuffled, ranked, one_sided)

SHARES = {("float32", "float32"): 60, ("wire", "bfloat16"): 22, ("bfloat16", "wire"): 13, ("argmax", "float32"): 5}
"""What is run, and in how many of a hundred interleavings."""

SEEDS_OF_A_WAIT = 24 if IS_FULL else 12

algorithms = pytest.mark.parametrize(("algorithm", "order"), ALGORITHMS)


def cases(algorithm: str, order: str | None, num_plays: int) -> Iterator[tuple[Case, int]]:
    """The cases of an algorithm, half of them in the gate, each with how often to play it: ``num_plays`` in all."""
    crossed = [(kinds, world_size) for kinds in SHARES for world_size in WORLD_SIZES]
    if not IS_FULL:
        start = ALGORITHMS.index((algorithm, order))
        crossed = [each for number, each in enumerate(crossed) if (number + number // 4 + start) % 2]
    counts = [max(1, num_plays * SHARES[kinds] * len(SHARES) // (100 * len(crossed))) for kinds, _ in crossed]
    counts[0] += max(0, num_plays - sum(counts))
    for (kinds, world_size), count in zip(crossed, counts):
        yield Case(algorithm, order, world_size, kinds), count


@algorithms
def test_every_interleaving_gives_the_right_result(
    algorithm: str, order: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    played, wrong = 0, []
    for case, count in cases(algorithm, order, -(-NUM_INTERLEAVINGS // len(ALGORITHMS))):
        scenario = Scenario(case)
        for seed in range(count):
            if not scenario.is_right(scenario.player, seed, STRATEGIES[seed % len(STRATEGIES)]):
                wrong.append((str(case), seed))
        played += count
    _tell(capsys, f"{algorithm}{f' in {order} order' if order else ''}: {played} interleavings, {len(wrong)} wrong")
    assert not wrong


@algorithms
def test_without_any_waits_most_interleavings_are_wrong(algorithm: str, order: str | None) -> None:
    scenario = Scenario(Case(algorithm, order, 3))
    player = scenario.player.without([each.wait for each in scenario.waits])
    assert sum(scenario.fails(player, seed) for seed in range(20)) >= 18


def test_every_play_starts_from_poison() -> None:
    """Else what an earlier play left behind would be right, too early."""
    scenario = Scenario(Case("ring", None, 2))
    assert scenario.is_right(scenario.player, 0)
    idle = mock.create_autospec(scenario.player, instance=True)
    assert not scenario.is_right(idle, 0)
    assert all((each == 255).all() for each in scenario.memory())


@dataclass
class Caught:
    """How many waits there are, and which ways of playing catch that one is missing."""

    waits: int = 0
    statically: int = 0
    shuffled: int = 0
    adversarially: int = 0
    either: int = 0

    def count(self, scenario: Scenario, each: NeededWait) -> None:
        player = scenario.player.without([each.wait])
        by_chance = any(scenario.fails(player, seed) for seed in range(SEEDS_OF_A_WAIT))
        waited_for = each.wait.record
        assert waited_for is not None
        hostile = adversarial(player, each.stream, waited_for.stream)
        strategies: Sequence[Strategy] = (hostile, ranked, one_sided)
        on_purpose = any(scenario.fails(player, seed, strategies[seed % 3]) for seed in range(SEEDS_OF_A_WAIT))
        self.waits += 1
        self.statically += scenario.is_caught_statically(each)
        self.shuffled += by_chance
        self.adversarially += on_purpose
        self.either += by_chance or on_purpose

    def add(self, other: Caught) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def __str__(self) -> str:
        shares = [f"{getattr(self, name) / self.waits:.1%} {name}" for name in ("shuffled", "adversarially", "either")]
        return f"{self.waits} waits left out, {self.statically} caught statically; by playing: {', '.join(shares)}"


def test_every_wait_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each wait of the second of two collectives is left out: the first one's copies may still read the staging."""
    total = Caught()
    for algorithm, order in ALGORITHMS:
        caught = Caught()
        for world_size in WORLD_SIZES if IS_FULL else (3,):
            scenario = Scenario(Case(algorithm, order, world_size, ("wire", "float32")))
            waits = [each for each in scenario.waits if each.call == 1]
            for each in waits if IS_FULL else waits[::2]:
                caught.count(scenario, each)
        _tell(capsys, f"{algorithm}{f' in {order} order' if order else ''}: {caught}")
        total.add(caught)
    _tell(capsys, f"all: {total}")
    assert total.statically == total.waits
    assert total.shuffled / total.waits > 0.7
    assert total.either / total.waits > 0.9


def _tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """In a full run on the terminal, else only where a test fails."""
    if IS_FULL:
        with capsys.disabled():
            print(f"\n{text}", end="")
    else:
        print(text)

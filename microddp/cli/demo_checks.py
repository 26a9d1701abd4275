"""What the demo holds against the truth: every figure of its table, and what it promises about the training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from microddp.cli.demo_training import Method, RankReport
from microddp.cli.formulas import Share, num_steps_formula, share_of
from microddp.schedule import schedule
from microddp.schedule.registry import find_algorithm

__all__ = ["CLOSENESS", "MIN_ACCURACY", "Check", "Comparison", "Traffic", "check_training", "compare"]

CLOSENESS: Final = 1e-5
MIN_ACCURACY: Final = 0.95


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: what it says, what was seen, and whether it was kept (None: it was not checked)."""

    name: str
    seen: str
    passed: bool | None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of all ranks of one role: each of them sent and received as much."""

    ranks: tuple[int, ...]
    sent: int
    received: int
    share: Share | None

    @property
    def is_right(self) -> bool:
        """Whether the counted bytes are the formula's."""
        return self.share is None or self.share.agrees(self.sent, self.received)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One algorithm on the real gradients.

    Attributes:
        nbytes: S, of one rank's gradients.
        steps: of its schedule.
        traffic: counted bytes, by role.
        time_ms: median over repetitions of the slowest rank's time.
        error: the largest difference from the mean in float64, on any rank.
        error_ratio: the largest ratio of a difference to what rounding explains for that element; at most 1.
        same_bits, promises_same_bits: whether all ranks hold the same bytes, and whether the algorithm says so.
        failures: what is not as it should be, in words.
    """

    method: Method
    nbytes: int
    steps: int
    traffic: list[Traffic]
    time_ms: float
    error: float
    error_ratio: float
    same_bits: bool
    promises_same_bits: bool
    failures: list[str] = field(default_factory=list)


def check_training(reports: Sequence[RankReport], alone: torch.Tensor, *, require_accuracy: bool) -> list[Check]:
    """Accuracy, equality of all ranks' parameters bit by bit, and closeness to training alone."""
    accuracy = reports[0].history[-1][1]
    first = _raw(reports[0].parameters)
    differing = [rank for rank, report in enumerate(reports) if _raw(report.parameters) != first]
    apart = max(_difference(report.parameters, alone) for report in reports)
    kept = accuracy >= MIN_ACCURACY if require_accuracy else None
    verb = "differs" if len(differing) == 1 else "differ"
    seen = "identical" if not differing else f"rank {', '.join(map(str, differing))} {verb} from rank 0"
    return [
        Check(f"accuracy on the test images is at least {MIN_ACCURACY:.0%}", f"{accuracy:.2%}", kept),
        Check("parameters have the same bits on every rank", seen, not differing),
        Check(f"parameters are within {CLOSENESS:g} of training alone", f"{apart:.1e} apart", apart <= CLOSENESS),
    ]


def compare(methods: Sequence[Method], reports: Sequence[RankReport]) -> list[Comparison]:
    """One comparison for each method, from what all ranks reported."""
    gradients = torch.stack([report.gradient for report in reports]).double()
    return [_compare(index, method, reports, gradients) for index, method in enumerate(methods)]


def _compare(index: int, method: Method, reports: Sequence[RankReport], gradients: torch.Tensor) -> Comparison:
    world_size, runs = len(reports), [report.runs[index] for report in reports]
    nbytes = reports[0].gradient.numel() * reports[0].gradient.element_size()
    off = torch.stack([run.result.double() for run in runs]) - gradients.mean(0)
    # n-1 additions and a division, each of which rounds by at most half a unit of the last place of what it adds up.
    allowed = (world_size + 1) * 2.0**-24 * gradients.abs().mean(0) + 2.0**-149
    seconds = statistics.median(max(times) for times in zip(*(run.seconds for run in runs)))
    found = Comparison(
        method,
        nbytes,
        schedule(method.algorithm, world_size, order=method.order).verify().num_steps,
        _traffic(method, [(run.bytes_sent, run.bytes_received) for run in runs], nbytes),
        seconds * 1e3,
        float(off.abs().max()),
        float((off.abs() / allowed).nan_to_num(nan=float("inf")).max()),
        len({_raw(run.result) for run in runs}) == 1,
        find_algorithm(method.algorithm, order=method.order).same_bits,
    )
    found.failures.extend(_failures(found, world_size))
    return found


def _failures(found: Comparison, world_size: int) -> list[str]:
    failures = [
        f"rank {', '.join(map(str, each.ranks))} sent {each.sent} and received {each.received} bytes, "
        f"not {each.share.sent} and {each.share.received}"
        for each in found.traffic
        if each.share is not None and not each.is_right
    ]
    steps = num_steps_formula(found.method.algorithm, world_size)
    if steps is not None and steps.nbytes != found.steps:
        failures.append(f"{found.steps} steps, not {steps}")
    if not found.error_ratio <= 1:
        failures.append(
            f"an error is {found.error_ratio:.3g} times what rounding explains; the largest: {found.error:.1e}"
        )
    if found.promises_same_bits and not found.same_bits:
        failures.append("the ranks' results differ in their bits")
    return failures


def _traffic(method: Method, counted: Sequence[tuple[int, int]], nbytes: int) -> list[Traffic]:
    world_size = len(counted)
    groups: dict[tuple[tuple[int, int], Share | None], list[int]] = {}
    for rank, pair in enumerate(counted):
        share = share_of(method.algorithm, rank, world_size, nbytes)
        groups.setdefault((pair, share), []).append(rank)
    return [Traffic(tuple(ranks), *pair, share) for (pair, share), ranks in groups.items()]


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest; infinite if either holds a NaN."""
    return float((left.double() - right.double()).abs().nan_to_num(nan=float("inf")).max())

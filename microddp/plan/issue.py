"""In which portions a host issues a plan: what to wait for, then what to start together."""

from __future__ import annotations

from dataclasses import dataclass

from microddp.plan.dependencies import ancestors
from microddp.plan.instructions import Plan, is_transfer

__all__ = ["Issue", "host_issues"]


@dataclass(frozen=True, slots=True)
class Issue:
    """One portion.

    Attributes:
        waits: indices of instructions that must be complete first: only transfers, each named once in the whole plan,
            since combines and copies are complete when they return and a host waits in order.
        indices: one combine or copy, or transfers that are posted together.
        is_post: whether they are transfers.
    """

    waits: tuple[int, ...]
    indices: tuple[int, ...]
    is_post: bool


def host_issues(plan: Plan) -> tuple[Issue, ...]:
    """The plan cut for a transport whose events the host waits for: neighbouring transfers go out in one post."""
    before = ancestors(plan.after)
    transfers = sum(1 << index for index, each in enumerate(plan.instructions) if is_transfer(each))
    issues: list[Issue] = []
    known = 0  # the transfers that the host has waited for by now
    batch = 0  # the transfers of the last issue, if more may join it
    for index, instruction in enumerate(plan.instructions):
        missing = before[index] & transfers & ~known
        if is_transfer(instruction) and batch and not missing:
            last = issues.pop()
            issues.append(Issue(last.waits, (*last.indices, index), is_post=True))
            batch |= 1 << index
            continue
        known |= missing
        is_post = is_transfer(instruction)
        issues.append(Issue(_bits(missing), (index,), is_post))
        batch = 1 << index if is_post else 0
    return tuple(issues)


def _bits(mask: int) -> tuple[int, ...]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)

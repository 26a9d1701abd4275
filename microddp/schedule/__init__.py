"""Schedules: all-reduce algorithms as data, proved before they run. Standard library only."""

# ruff: noqa: I001
from __future__ import annotations

# Importing an algorithm's module registers it; this order is the order in which they are listed.
from microddp.schedule import naive, tree, ring, full_ring, direct  # noqa: F401
from microddp.schedule.ir import OWN, Fold, Keep, Recv, Send, Step, cyclic, everyone, only
from microddp.schedule.registry import Algorithm, algorithm, algorithm_names, find_algorithm, unregister
from microddp.schedule.schedule import Schedule, schedule
from microddp.schedule.verify import Proof

__all__ = [
    "OWN",
    "Algorithm",
    "Fold",
    "Keep",
    "Proof",
    "Recv",
    "Schedule",
    "Send",
    "Step",
    "algorithm",
    "algorithm_names",
    "cyclic",
    "everyone",
    "find_algorithm",
    "only",
    "schedule",
    "unregister",
]

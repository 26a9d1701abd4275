"""Verified all-reduce: algorithms as data, proved, planned and played on threads, processes and GPUs."""

from __future__ import annotations

# The subpackage first: importing it binds the name ``schedule`` to it here, and the function then takes the name.
# ``from microddp.schedule import …`` finds the subpackage all the same, as imports go by sys.modules.
import microddp.schedule  # noqa: F401
from microddp.api import init, run_processes, run_threads
from microddp.communicator import Communicator
from microddp.errors import (
    ClosedError,
    CollectiveTimeoutError,
    MicroddpError,
    MismatchError,
    PlanError,
    RemoteError,
    ScheduleError,
    TransportError,
)
from microddp.planner import Choice
from microddp.schedule import algorithm, algorithm_names, schedule, unregister
from microddp.transport.base import Counters
from microddp.work import Work
from microddp_kernels.declare import reduce_op
from microddp_kernels.lane_operators import premul_sum
from microddp_kernels.op_registry import op_names
from microddp_kernels.reduce_op import Lane, ReduceOp

__all__ = [
    "Choice",
    "ClosedError",
    "CollectiveTimeoutError",
    "Communicator",
    "Counters",
    "Lane",
    "MicroddpError",
    "MismatchError",
    "PlanError",
    "ReduceOp",
    "RemoteError",
    "ScheduleError",
    "TransportError",
    "Work",
    "algorithm",
    "algorithm_names",
    "init",
    "op_names",
    "premul_sum",
    "reduce_op",
    "run_processes",
    "run_threads",
    "schedule",
    "unregister",
]

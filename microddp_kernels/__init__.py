"""Reduction kernels: operators, and launchers that run them on blocks of elements. Nothing here knows of ranks."""

from __future__ import annotations

import microddp_kernels.lane_operators  # noqa: F401 - makes them known by name
from microddp_kernels.launchers import launcher_for
from microddp_kernels.operators import get_op, op_names
from microddp_kernels.reduce_op import CombineSpec, Lane, ReduceOp

__all__ = ["CombineSpec", "Lane", "ReduceOp", "get_op", "launcher_for", "op_names"]

"""Plans: one rank's instructions for one size, lowered from a schedule, checked for races and proved."""

from __future__ import annotations

from microddp.plan.dependencies import derive
from microddp.plan.hazards import Race, check_races, find_races
from microddp.plan.instructions import Plan
from microddp.plan.lower import LoweringConfig, lower
from microddp.plan.passes import hoist
from microddp.plan.proof import prove
from microddp.plan.rank_order import check_ranks
from microddp.plan.stream_hazards import check_streams, find_sequence_races, find_stream_races
from microddp.plan.streams import StreamProgram, stream_program

__all__ = [
    "LoweringConfig",
    "Plan",
    "Race",
    "StreamProgram",
    "check_races",
    "check_ranks",
    "check_streams",
    "derive",
    "find_races",
    "find_sequence_races",
    "find_stream_races",
    "hoist",
    "lower",
    "prove",
    "stream_program",
]

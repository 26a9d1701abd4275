"""What the ranges of a trace are called: collectives, groups of transfers, kernels. It knows no algorithm.

Steps and slices count from 1, as a person does who reads "step 2/3".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from microddp.plan.instructions import DATA, Combine, Copy, Instruction, Plan, RecvCombine, Send, Span, is_transfer
from microddp.schedule import Schedule, find_algorithm
from microddp.staging import LaneTypes
from microddp.transport.base import Header
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["Names", "Phase", "collective_name", "kernel_name", "phases_of"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_IN_RANK_ORDER = " in rank order"
_MAX_ASKED = 64


class Phase(NamedTuple):
    """Steps [start, stop) of a schedule that do the same kind of thing."""

    name: str
    start: int
    stop: int


def collective_name(header: Header, world_size: int) -> str:
    """``microddp/all_reduce ring n=4 64MiB bf16``."""
    algorithm = "" if header.algorithm == header.collective else f" {header.algorithm}"
    return f"microddp/{header.collective}{algorithm} n={world_size} {_size(header.nbytes)} {_short(header.dtype)}"


def phases_of(header: Header, plan: Plan) -> tuple[Phase, ...]:
    """The phases of a collective: its steps up to the last one in which a rank folds, and those after it.

    Where the tensor is cut into chunks that the ranks share out, these are a scatter-reduce and an all-gather, else a
    reduce and a broadcast. Of an algorithm that is not registered only ``plan`` is known: reduce and copy.
    """
    in_order = header.algorithm.endswith(_IN_RANK_ORDER)
    try:
        name = header.algorithm.removesuffix(_IN_RANK_ORDER)
        entry = find_algorithm(name, order="rank" if in_order else None)
    except ValueError:
        return _phases_of_plan(plan)
    return _phases_of_schedule(Schedule(entry, plan.world_size, header.root))


@lru_cache(maxsize=64)
def _phases_of_schedule(schedule: Schedule) -> tuple[Phase, ...]:
    n, num_steps, num_reducing = schedule.world_size, 0, 0
    for rank in range(0, n, -(-n // _MAX_ASKED)):  # of many ranks, some tell enough
        for number, step in enumerate(schedule.steps(rank), start=1):
            num_steps = max(num_steps, number)
            if step.folds:
                num_reducing = max(num_reducing, number)
    is_shared_out = schedule.num_chunks > 1 and not schedule.entry.rooted
    names = ("scatter-reduce", "all-gather") if is_shared_out else ("reduce", "broadcast")
    return _two_phases(names, num_reducing, num_steps)


def _phases_of_plan(plan: Plan) -> tuple[Phase, ...]:
    num_steps = max((each.step + 1 for each in plan.instructions), default=0)
    reducing = (each.step + 1 for each in plan.instructions if isinstance(each, (Combine, RecvCombine)))
    return _two_phases(("reduce", "copy"), max(reducing, default=0), num_steps)


def _two_phases(names: tuple[str, str], num_reducing: int, num_steps: int) -> tuple[Phase, ...]:
    phases = Phase(names[0], 0, num_reducing), Phase(names[1], num_reducing, num_steps)
    return tuple(each for each in phases if each.start < each.stop)


def kernel_name(plan: Plan, instruction: Instruction, op: ReduceOp | None, types: Sequence[LaneTypes] | None) -> str:
    """What a combine or copy does, by verb and operator: ``combine sum``, ``fold avg``, ``convert float32→bfloat16``.

    Two operands are combined; more of them, weighted ones, and those that are divided or finished, are folded.
    """
    if isinstance(instruction, Copy):
        return _copy_name(plan, instruction.out, instruction.source, types or ())
    if not isinstance(instruction, (Combine, RecvCombine)):
        raise TypeError(f"{instruction} is no kernel")
    is_plain = len(instruction.operands) == 2 and instruction.weights is None and instruction.divisor is None
    return f"{'combine' if is_plain else 'fold'} {'none' if op is None else op.name}"


def _copy_name(plan: Plan, out: Span, source: Span, types: Sequence[LaneTypes]) -> str:
    texts = []
    for each in types:
        into, what = (_dtype(plan, span, each) for span in (out, source))
        text = "copy" if into == what else f"convert {what}→{into}"
        if text not in texts:
            texts.append(text)
    return ", ".join(texts) or "copy"


def _dtype(plan: Plan, span: Span, types: LaneTypes) -> str:
    is_wide = plan.buffers[span.buffer].wide
    found = types.data if span.buffer == DATA else types.wide if is_wide else types.wire
    return str(found).removeprefix("torch.")


@dataclass(frozen=True)
class Names:
    """The names of one plan's ranges."""

    plan: Plan
    phases: tuple[Phase, ...]
    num_slices: int
    op: ReduceOp | None = None
    types: tuple[LaneTypes, ...] | None = None

    @classmethod
    def of(cls, plan: Plan, header: Header, op: ReduceOp | None, types: tuple[LaneTypes, ...] | None) -> Names:
        """Of a plan that is run as ``header`` says."""
        num_slices = max((each.slice + 1 for each in plan.instructions if is_transfer(each)), default=0)
        return cls(plan, phases_of(header, plan), num_slices, op, types)

    def group(self, indices: Sequence[int]) -> str:
        """``scatter-reduce step 2/3 slice 1/8 send→1 recv←3``: what travels, by step and slice, in plan order."""
        portions: dict[tuple[int, int], list[Instruction]] = {}
        for index in indices:
            instruction = self.plan.instructions[index]
            portions.setdefault((instruction.step, instruction.slice), []).append(instruction)
        return "; ".join(f"{self._place(*key)} {_ends(found)}" for key, found in portions.items())

    def kernel(self, index: int) -> str:
        """See ``kernel_name``."""
        return kernel_name(self.plan, self.plan.instructions[index], self.op, self.types)

    def _place(self, step: int, piece: int) -> str:
        text = f"step {step + 1}"
        for phase in self.phases:
            if phase.start <= step < phase.stop:
                text = f"{phase.name} step {step - phase.start + 1}/{phase.stop - phase.start}"
        return f"{text} slice {piece + 1}/{self.num_slices}"


def _ends(instructions: Sequence[Instruction]) -> str:
    """``send→1,2 recv←3``."""
    peers: dict[str, list[str]] = {"send→": [], "recv←": [], "recv-combine←": []}
    for each in instructions:
        if isinstance(each, (Combine, Copy)):
            raise TypeError(f"{each} is no transfer")
        verb = "send→" if isinstance(each, Send) else "recv-combine←" if isinstance(each, RecvCombine) else "recv←"
        peers[verb].append(str(each.peer))
    return " ".join(f"{verb}{','.join(found)}" for verb, found in peers.items() if found)


def _size(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f}".removesuffix(".0") + name
    return f"{nbytes}B"


def _short(dtype: str) -> str:
    """``bf16`` and ``fp32`` for bfloat16 and float32, within any text."""
    return re.sub(r"\bfloat(?=\d)", "fp", dtype.replace("bfloat", "bf"))

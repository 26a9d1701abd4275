"""Operators that are not what they declare, and the law by which ``check_operator`` must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from microddp.testing.samples import Sampler
from microddp_kernels import ReduceOp
from microddp_kernels.dtypes import BOOL
from microddp_kernels.reduce_op import Values
from tests.testing import user_functions as functions
from tests.testing.operators import (
    ENTRIES,
    MOMENTS,
    TWO_FLOATS,
    VALUE_AND_INDEX,
    WEIGHT_AND_ROWS,
    make_op,
    sample_moments,
    sample_moments_in_use,
)

I8, I32, BF16 = frozenset({torch.int8}), frozenset({torch.int32}), frozenset({torch.bfloat16})
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Mutant:
    """What is wrong, and where the error must be seen."""

    about: str
    op: ReduceOp
    law: str
    launcher: str = "interpreter"
    samples: Sampler | None = None


def _adds(*others: torch.Tensor) -> torch.Tensor:
    first, second = others
    return first + second


def _with(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """A sum that ``change(total, first, second)`` spoils."""

    def twin(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        total = first + second
        changed = change(total, first, second)
        return total if changed is None else torch.as_tensor(changed)

    return twin


def _large_ones_wrong(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.where(total.abs() > 1e30, total * 1.0000002, total)


def _subnormals_flushed(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.where(total.abs() < 2.0**-126, 0.0, total)


def _nan_of_the_second_lost(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.where(second.isnan(), first, total)


def _last_bit_wrong(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.where(total == 3.5, torch.nextafter(total, total + 1), total)


def _added_as_integers(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.int() + second.int()).float()


def _writing_add(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    torch.add(first, second, out=out)
    if second.data_ptr() != out.data_ptr():
        second.zero_()
    return out


def _stateful() -> Callable[..., torch.Tensor]:
    """A sum that is wrong when ``out`` is its second operand, as if that were written too early."""

    def add(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if second.data_ptr() == out.data_ptr():
            out.copy_(first)
        return torch.add(first, second, out=out)

    return add


def _lanes_swapped(first: Pair, second: Pair) -> Values:
    return first[1] * second[1], first[0] + second[0]


def _one_lane_wrong(first: Pair, second: Pair) -> Values:
    takes_second = (second[0] > first[0]) | (second[0].isnan() & ~first[0].isnan())
    return torch.where(takes_second, second[0], first[0]), torch.minimum(first[1], second[1])


def _scaled_lane(first: Pair, second: Pair) -> Values:
    return first[0] + second[0], (first[1] * second[1]).abs()


def _twin(function: Callable[..., Any], **declared: Any) -> ReduceOp:
    return make_op(functions.add, torch_function=function, **declared)


MUTANTS = [
    Mutant("subtraction, declared commutative", make_op(functions.subtract, associative=False), "commutative"),
    Mutant("subtraction, declared associative", make_op(functions.subtract, commutative=False), "associative"),
    Mutant("a mean of two, declared associative", make_op(functions.mean_of_two), "associative"),
    Mutant("a maximum without NaN", make_op(functions.larger_number, nan="propagate"), "nan propagates"),
    Mutant("NaN taken, not ignored", make_op(functions.largest_size, nan="ignore"), "nan ignored"),
    Mutant("the other zero", make_op(functions.larger_by_comparison), "commutative"),
    Mutant("a b + a", make_op(functions.times_and_plus), "commutative"),
    Mutant(
        "argmax, ties to the first operand", make_op(functions.argmax_first_wins, lanes=VALUE_AND_INDEX), "commutative"
    ),
    Mutant("argmax, NaN forgotten", make_op(functions.argmax_forgetting_nan, lanes=VALUE_AND_INDEX), "commutative"),
    Mutant("half of the first, in float32 only", make_op(functions.half_of_the_first_added), "commutative"),
    Mutant(
        "another sign where lanes are equal",
        make_op(functions.negated_where_lanes_are_equal, lanes=ENTRIES[:3]),
        "associative",
    ),
    Mutant("saturating integers", make_op(functions.saturating_add, I32), "associative"),
    Mutant("a sum through integers", make_op(functions.add_through_integers, nan="propagate"), "nan propagates"),
    Mutant("a sum rounded to float16", make_op(functions.add_in_float16), "associative"),
    Mutant("subnormals lost in one operand", make_op(functions.add_flushing_the_first), "commutative"),
    Mutant("subnormals lost in the sum", make_op(functions.add_flushing_the_sum), "associative"),
    Mutant("large values swallow the other", make_op(functions.add_unless_large), "commutative"),
    Mutant("implication", make_op(functions.implies, BOOL), "commutative"),
    Mutant("implication, not declared commutative", make_op(functions.implies, BOOL, commutative=False), "associative"),
    Mutant("a matrix product, declared commutative", make_op(functions.matrix_product, lanes=ENTRIES), "commutative"),
    Mutant(
        "means of nothing",
        make_op(functions.welford_unguarded, lanes=MOMENTS, commutative=False),
        "associative",
        samples=sample_moments,
    ),
    Mutant(
        "deviations weighted wrongly",
        make_op(functions.welford_misweighted, lanes=MOMENTS),
        "commutative",
        samples=sample_moments_in_use,
    ),
    Mutant(
        "deviations weighted wrongly, not declared commutative",
        make_op(functions.welford_misweighted, lanes=MOMENTS, commutative=False),
        "associative",
        samples=sample_moments_in_use,
    ),
    Mutant("log of a sum of infinite terms", make_op(functions.log_of_sum), "associative"),
    Mutant("wide rows weighted by one side", make_op(functions.scaled_rows, lanes=WEIGHT_AND_ROWS), "associative"),
    Mutant(
        "a torch twin that differs for -0.0 only",
        make_op(functions.add_losing_the_sign_of_zero, torch_function=_adds),
        "launchers agree",
        "eager",
    ),
    Mutant("a torch twin wrong for large values", _twin(_with(_large_ones_wrong)), "launchers agree", "eager"),
    Mutant("a torch twin that flushes subnormals", _twin(_with(_subnormals_flushed)), "launchers agree", "eager"),
    Mutant("a torch twin one bit off", _twin(_with(_last_bit_wrong)), "launchers agree", "eager"),
    Mutant(
        "a torch twin through integers", _twin(lambda a, b: (a.int() + b.int()).float()), "launchers agree", "eager"
    ),
    Mutant(
        "a torch twin that loses NaN on the right",
        _twin(_with(_nan_of_the_second_lost), nan="propagate"),
        "nan propagates",
        "eager",
    ),
    Mutant(
        "lanes swapped by the torch twin",
        make_op(functions.sum_and_product, lanes=TWO_FLOATS, torch_function=_lanes_swapped),
        "launchers agree",
        "eager",
    ),
    Mutant(
        "one lane of the torch twin wrong for negative values",
        make_op(functions.sum_and_product, lanes=TWO_FLOATS, torch_function=_scaled_lane),
        "launchers agree",
        "eager",
    ),
    Mutant(
        "a torch finalize that differs",
        make_op(functions.add, finalize=functions.per_rank, torch_finalize=lambda x, world_size: x * world_size),
        "launchers agree",
        "eager",
    ),
    Mutant(
        "a torch finalize that ignores the world size",
        make_op(functions.add, finalize=functions.per_rank, torch_finalize=lambda x, world_size: x + 1),
        "launchers agree",
        "eager",
    ),
    Mutant(
        "an eager that writes an operand", make_op(functions.add, eager=_writing_add), "operands unchanged", "eager"
    ),
    Mutant("an eager wrong when out is an operand", make_op(functions.add, eager=_stateful()), "aliasing", "eager"),
    Mutant(
        "a torch twin that rounds to bfloat16 twice",
        make_op(functions.add, BF16, torch_function=lambda a, b: (a.bfloat16() + b.bfloat16()).float()),
        "launchers agree",
        "eager",
    ),
]

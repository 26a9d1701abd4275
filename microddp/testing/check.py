"""``check_operator``: property tests of what an operator declares, for the test suites of those who write operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from microddp.testing.agreement import check_agreement
from microddp.testing.case import Case, Settings
from microddp.testing.laws import check_laws
from microddp.testing.nan_claims import check_nan_claim
from microddp.testing.report import CheckRecord, OperatorReport
from microddp.testing.runners import runners_named
from microddp.testing.samples import Sampler
from microddp_kernels.op_registry import get_op
from microddp_kernels.reduce_op import ReduceOp

__all__ = ["check_operator"]

_PREFERRED: Final = (torch.float32, torch.int64, torch.float64, torch.int32, torch.bool)


def check_operator(
    op: ReduceOp | str,
    *,
    dtypes: Sequence[torch.dtype | tuple[torch.dtype, ...]] | None = None,
    samples: Sampler | None = None,
    seed: int = 0,
    numel: int = 2048,
    max_ulps: float | None = None,
    zero_signs: bool | None = None,
    rtol: float = 2.0**-40,
    rounds_once: bool = True,
    launchers: Sequence[str] | None = None,
) -> OperatorReport:
    """Tests an operator on every combination of special operands and on random ones.

    - *commutative*, *associative*, where declared: in float64 (complex128), so that the rounding of the element type
      plays no part (in float32 if the operator calls what takes no other type, as the report then notes). What remains
      of rounding is a tolerance of ``rtol`` at the largest value of the lane that occurs, or more where small errors in
      what is combined are seen to make more. Exact on integers, wrapping around, and on bool. Equal operands,
      infinities, NaN, subnormals and zeros of both signs are among the samples.
    - *nan propagates*, *nan ignored*, where claimed: NaN in a float lane of any operand makes that lane of the result
      NaN; or an operand of NaN in all its float lanes is as good as absent. In folds of two and of three operands.
    - *launchers agree*: to the bit if the operator's Triton functions call only what is rounded exactly, else within
      ``max_ulps``. The payload of NaN is free.
    - *rounded once*: the stored result is the float64 one within half a unit of the element type and what a few
      roundings in the accumulation type lose.
    - *one fold*: operands combined in one launch give what they give in several.
    - *aliasing*: ``out`` may be an operand. *operands unchanged*: nothing else is written.
    - *finished once*: ``finalize`` (or the division) is done once, on the complete fold.
    - *runs*: none of this raises.

    The default samples are anything an element can hold. Infinities in several lanes or in complex numbers obey no
    algebra, not even in a product of matrices, so with these samples laws are not held to give the same NaN there.

    Args:
        op: the operator, or its name.
        dtypes: the element types to test, for several lanes tuples of one type a lane. None: every type that the
            operator declares; for several lanes every type of each lane, beside one choice of the others.
        samples: ``samples(random, numel, dtypes)`` returns that many valid operands (a 1-D tensor, or a tuple of them,
            one a lane, a wide lane row after row) for an operator that is defined on some states only. It is called
            for as few as 16 (8 with a wide lane), whose combinations are all tried.
        seed: of the random operands.
        numel: how many random operands, beside the 4096 combinations of 16 (512 of 8 with a wide lane).
        max_ulps: by how many units in the last place of the accumulation type launchers may differ for each combine, at
            the largest value involved. None: 0, or 4 if the operator calls functions whose rounding no rule fixes, such
            as exp.
        zero_signs: whether -0.0 and 0.0 are different results. None: between launchers they are, in laws for a single
            lane of real numbers.
        rtol: see above.
        rounds_once: whether results are compared with float64's. False for an operator that measures its own rounding,
            such as a compensated sum, whose results are meant to be others in another type.
        launchers: names of launchers; the first one also computes in float64. None: interpreter (unless the operator
            calls functions of libdevice, which it does not know), eager, and compiled if there is a GPU.

    Returns:
        What was checked; ``print`` it.

    Raises:
        OperatorError: something does not hold. The text has the simplest counterexample found.
        TypeError, ValueError: the arguments make no sense.
        ImportError: a launcher needs Triton, which is not installed.
    """
    op = get_op(op)
    if isinstance(numel, bool) or not isinstance(numel, int) or numel < 1:
        raise ValueError(f"numel must be a positive integer, got {numel!r}")
    if max_ulps is not None and not max_ulps >= 0:
        raise ValueError(f"max_ulps must be at least 0, got {max_ulps}")
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol must be at least 0 and below 1, got {rtol}")
    combinations = _every_combination(op) if dtypes is None else [_checked(op, each) for each in dtypes]
    if not combinations:
        raise ValueError("dtypes must name one element type at least")
    runners = runners_named(launchers, op)
    settings = Settings(seed, numel, max_ulps, zero_signs, rtol, rounds_once)
    records: list[CheckRecord] = []
    for each in combinations:
        case = Case(op, each, runners, settings, samples, records)
        check_nan_claim(case)
        check_laws(case)
        check_agreement(case)
    notes = tuple(note for runner in runners for note in runner.notes)
    return OperatorReport(op.name, seed, tuple(records), notes)


def _checked(op: ReduceOp, dtypes: torch.dtype | tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    given = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if len(given) != op.num_lanes:
        raise ValueError(f"operator {op.name!r} has {op.num_lanes} lanes; dtypes must give as many types, got {dtypes}")
    for lane, dtype in enumerate(given):
        op.check_dtype(dtype, lane)
    return given


def _every_combination(op: ReduceOp) -> list[tuple[torch.dtype, ...]]:
    """Each type of each lane at least once."""
    if not op.lanes:
        return [(dtype,) for dtype in _sorted(op.dtypes)]
    usual = [_sorted(lane.dtypes)[0] for lane in op.lanes]
    found: dict[tuple[torch.dtype, ...], None] = {}
    for index, lane in enumerate(op.lanes):
        for dtype in _sorted(lane.dtypes):
            chosen = (*usual[:index], dtype, *usual[index + 1 :])
            found[chosen] = None
    return list(found)


def _sorted(dtypes: frozenset[torch.dtype]) -> list[torch.dtype]:
    return sorted(dtypes, key=lambda dtype: (dtype not in _PREFERRED, _rank(dtype), str(dtype)))


def _rank(dtype: torch.dtype) -> int:
    return _PREFERRED.index(dtype) if dtype in _PREFERRED else len(_PREFERRED)

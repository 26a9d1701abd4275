"""The compiled launcher against the eager one on the CPU, by several processes, as compiling takes the time.

On a stand-in Triton's interpreter takes the place of the compiled launcher, for a few cases.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from bench.device.launcher_cases import NUMELS, all_cases, compare_case
from bench.device.records import Context, Outcome, checks_of
from bench.device.team import Team
from microddp_kernels.launchers import launcher_for

__all__ = ["prepare", "run", "work"]

_WORK: Final = "bench.device.part_launchers:work"
_MAX_WORKERS: Final = 12
_STAND_IN_NUMEL: Final = 67
_SHOWN: Final = 3


def prepare(context: Context) -> Team:
    """Starts the workers."""
    count = 1 if context.stand_in else max(1, min(_MAX_WORKERS, (os.cpu_count() or 2) - 2))
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return Team(context, "launchers", _WORK, [threads] * count)


def run(context: Context) -> None:
    """Has the workers go through the cases until the time is up."""
    team: Team = context.prepared
    total = len(all_cases(context.stand_in)) * (1 if context.stand_in else len(NUMELS))
    with team:
        outcomes = team.run(context.left())
    for number, outcome in enumerate(outcomes):
        _take_over(context, number, outcome)
    done = [check for outcome in outcomes for check in checks_of(outcome.records)]
    wrong = [check for check in done if not check["ok"]]
    context.check("something was compared", bool(done))
    pair = "interpreter against eager" if context.stand_in else "compiled against eager"
    context.summary(f"{pair}: {len(done)} of {total} done, {len(wrong)} wrong, {len(outcomes)} processes")
    for check in wrong[:_SHOWN]:
        context.summary(f"{check['name']}: {check['detail']}")


def _take_over(context: Context, number: int, outcome: Outcome) -> None:
    for check in checks_of(outcome.records):
        context.check(check["name"], check["ok"], check["detail"])
    if outcome.status not in ("ok", "FAILED"):
        context.check(f"worker {number}", False, f"{outcome.status}: {outcome.detail}")
        context.note(f"worker {number}", outcome.errors)


def work(context: Context) -> None:
    """Every so-manieth case, at the first size; then all at the others."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if context.stand_in else torch.device("cuda", 0)
    launcher = launcher_for(device, "interpreter" if context.stand_in else "compiled")
    reference = launcher_for(torch.device("cpu"), "eager")
    number, count = context.options["number"], context.options["count"]
    cases = all_cases(context.stand_in)
    for numel in (_STAND_IN_NUMEL,) if context.stand_in else NUMELS:
        for case in cases[number::count]:
            if context.left() < 1.0:
                return
            name = f"{case.kernel} {case.operator or '-'} {','.join(case.dtypes)} [{numel}]"
            context.step(name)
            try:
                text = compare_case(launcher, device, reference, case, numel)
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                if "CUDA error" in text:  # nothing works in this process any more
                    context.check(name, False, text)
                    raise
            context.check(name, not text, text)

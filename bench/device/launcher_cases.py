"""What the launchers are compared on: every kernel, operator and element type, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from bench.device.comparing import INEXACT, difference, states
from microddp.testing.samples import default_values
from microddp_kernels.inspection.cases import DTYPES, KERNELS, cases_for, load_operator
from microddp_kernels.inspection.facts import Case
from microddp_kernels.launchers import Launcher
from microddp_kernels.reduce_op import CombineSpec, ReduceOp

__all__ = ["NUMELS", "all_cases", "compare_case"]

NUMELS: Final = (4099, 127, 1)
"""Whole blocks and a tail; less than a block; Triton compiles anew for an integer that is 1."""

_USERS: Final = "bench.device.user_operator:absmin"
_ARCH: Final = 90  # of no meaning here
_QUICK_KERNELS: Final = ("combine", "fold")

Lanes = tuple[torch.Tensor, ...]


def all_cases(quick: bool = False) -> list[Case]:
    """One type of every operator and kernel first, then all types, kernel by kernel; ``quick``: a few of them."""
    kernels = _QUICK_KERNELS if quick else tuple(KERNELS)
    users = cases_for([_ARCH], [_USERS], kernels=_QUICK_KERNELS)
    every = [*cases_for([_ARCH], kernels=kernels, quick=True), *users, *cases_for([_ARCH], kernels=kernels)]
    found = list(dict.fromkeys(every))
    return found[:12] if quick else found


def compare_case(launcher: Launcher, device: torch.device, reference: Launcher, case: Case, numel: int) -> str:
    """Runs a case by both launchers, the reference's on the CPU; returns where they differ, or ""."""
    if not case.operator:
        return _COPIES[case.kernel](launcher, device, reference, case, numel)
    op = load_operator(case.operator)
    dtypes = tuple(DTYPES[each] for each in case.dtypes)
    num_operands = 4 if case.kernel in ("fold", "finish") else 2
    if case.kernel == "wire":
        operands = [states(op, (dtype,), numel, seed) for seed, dtype in enumerate(dtypes)]
    else:
        operands = [states(op, dtypes, numel, seed) for seed in range(num_operands)]
    how = CombineSpec(
        op,
        weights=(3, 1) if case.kernel == "weighted" else None,
        divisor=4 if case.kernel == "finish" else None,
    )
    want = _combined(reference, torch.device("cpu"), op, operands, how)
    found = _combined(launcher, device, op, operands, how)
    texts = []
    for lane, (one, two) in enumerate(zip(found, want)):
        inexact = op.name in INEXACT and one.dtype.is_floating_point
        text = difference(one, two, op.accumulation_dtype(one.dtype) if inexact else None)
        texts += [f"lane {lane}: {text}" if op.lanes else text] if text else []
    return "; ".join(texts)


def _combined(
    launcher: Launcher, device: torch.device, op: ReduceOp, operands: Sequence[Lanes], how: CombineSpec
) -> Lanes:
    """The result on the CPU, out of memory that held other bytes before."""
    given = [tuple(lane.to(device, copy=True) for lane in operand) for operand in operands]
    out = tuple(_poisoned(lane.shape, lane.dtype, device) for lane in given[0])
    values: list[Any] = [lanes if op.lanes else lanes[0] for lanes in (out, *given)]
    launcher.combine(values[0], values[1:], how)
    return tuple(lane.cpu() for lane in out)


def _poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    return torch.full((nbytes,), 0x5A, dtype=torch.uint8, device=device).view(dtype).view(tuple(shape))


def _copy(launcher: Launcher, device: torch.device, reference: Launcher, case: Case, numel: int) -> str:
    """A copy of one type, or between two."""
    kinds = [DTYPES[each] for each in case.dtypes]
    source = default_values(np.random.default_rng(1), numel, kinds[-1])
    return _copied(launcher, device, reference, kinds[0], source, lambda base: base)


def _strided(launcher: Launcher, device: torch.device, reference: Launcher, case: Case, numel: int) -> str:
    """A transposed matrix, and every third element."""
    dtype = DTYPES[case.dtypes[0]]
    source = default_values(np.random.default_rng(1), 3 * numel, dtype)
    texts = (
        _copied(launcher, device, reference, dtype, source, lambda base: base.view(3, numel).t()),
        _copied(launcher, device, reference, dtype, source, lambda base: base[::3]),
    )
    return "; ".join(each for each in texts if each)


def _copied(
    launcher: Launcher,
    device: torch.device,
    reference: Launcher,
    dtype: torch.dtype,
    source: torch.Tensor,
    view: Callable[[torch.Tensor], torch.Tensor],
) -> str:
    results = []
    for each, where in ((launcher, device), (reference, torch.device("cpu"))):
        seen = view(source.to(where, copy=True))
        out = _poisoned(seen.shape, dtype, where)
        each.copy(out, seen)
        results.append(out.cpu())
    return difference(results[0], results[1], None)


def _packs(launcher: Launcher, device: torch.device, reference: Launcher, case: Case, numel: int) -> str:
    """Three tensors into one and back; what was packed is also what torch concatenates."""
    dtype = DTYPES[case.dtypes[0]]
    sizes = (numel, 1, 2 * numel + 5)
    parts = [default_values(np.random.default_rng(seed), size, dtype) for seed, size in enumerate(sizes)]
    on_device = [part.to(device) for part in parts]
    whole = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
    if case.kernel == "pack":
        flat = _poisoned((sum(sizes),), dtype, device)
        launcher.pack(flat, on_device)
        return difference(flat.cpu(), whole, None)
    outs = [_poisoned((size,), dtype, device) for size in sizes]
    launcher.unpack(outs, whole.to(device))
    texts = [difference(out.cpu(), part, None) for out, part in zip(outs, parts)]
    return "; ".join(text for text in texts if text)


_COPIES: Final[dict[str, Callable[[Launcher, torch.device, Launcher, Case, int], str]]] = {
    "copy": _copy,
    "convert": _copy,
    "strided": _strided,
    "pack": _packs,
    "unpack": _packs,
}

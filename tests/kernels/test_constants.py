"""What kernels are given as constants is understood by every Triton that the project runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from microddp_kernels.launchers.blocks import combine_on_blocks
from microddp_kernels.launchers.copies import copy_on_blocks
from microddp_kernels.operators import get_op
from microddp_kernels.reduce_op import CombineSpec

Constants = dict[str, Any]


def constants_of(*cases: Any) -> list[Constants]:
    found: list[Constants] = []

    def launch(kernel: Any, num_programs: int, arguments: tuple[Any, ...], constants: Constants) -> None:
        found.append(constants)

    for case in cases:
        case(launch)
    return found


def fold(op: str, dtypes: tuple[torch.dtype, ...], count: int, width: int = 1) -> Any:
    lanes = tuple(
        torch.ones(6 * (width if place == len(dtypes) - 1 else 1), dtype=each) for place, each in enumerate(dtypes)
    )
    values: Any = lanes if len(lanes) > 1 else lanes[0]
    return lambda launch: combine_on_blocks(launch, values, [values] * count, CombineSpec(get_op(op)), 64, False)


def bare_items(value: Any) -> list[Any]:
    """What lies in a tuple as it is. Triton 3.6 takes it for a value of the kernel there; 3.7 and later wrap it."""
    if not isinstance(value, tuple):
        return []
    bare = [each for each in value if not isinstance(each, (tuple, tl.constexpr))]
    return bare + [one for each in value for one in bare_items(each)]


def test_items_of_tuples_are_constants_themselves() -> None:
    half, single, index = torch.bfloat16, torch.float32, torch.int64
    cases = constants_of(
        fold("sum", (half,), 2),
        fold("sum", (half,), 3),
        fold("sum", (torch.complex64,), 2),
        fold("argmax", (single, index), 2),
        fold("softmax_merge", (single, single, single), 2, width=4),
        lambda launch: copy_on_blocks(launch, torch.ones(6), torch.ones(6, dtype=half), 64),
        lambda launch: copy_on_blocks(launch, torch.ones(6, 4).T, torch.ones(4, 6, dtype=half), 64),
    )
    assert len(cases) >= 7
    for constants in cases:
        for name, value in constants.items():
            assert not bare_items(value), f"{name} holds {bare_items(value)}"
    assert bare_items(("float32", (tl.constexpr(1), 2))) == ["float32", 2]

"""Compiles what the compiled launcher launches, for sm_90 and without a GPU; prints what the PTX holds, as JSON.

Triton's driver is replaced by one that names the target, and each launch by a warm-up with the same arguments, so that
specialisation, signature and options are those of a real launch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from microddp_kernels import CombineSpec, get_op, launcher_for, op_names
from microddp_kernels.launchers import compiled
from microddp_kernels.launchers.blocks import combine_on_blocks, copy_on_blocks

INTERESTING = re.compile(
    r"\s((?:ld|st)\.global[.\w]*|fma[.\w]*|mad[.\w]*|div[.\w]*|cvt\.rn[.\w]*|add\.[.\w]*|max\.[.\w]*)\s"
)


class NamedTarget:
    """A driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all() -> dict[str, Any]:
    facts: dict[str, Any] = {}

    def compile_as(case: str) -> Any:
        def launch(kernel: Any, num_programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
            asm = kernel.warmup(*arguments, grid=(num_programs,), **constants, **compiled._OPTIONS).asm
            offsets = set(re.findall(r"tt\.addptr .*, tensor<\d+x(i\d+)>", asm["ttir"]))
            facts[case] = {"ptx": Counter(INTERESTING.findall(asm["ptx"])), "offsets": sorted(offsets)}

        return launch

    def combine(case: str, dtype: torch.dtype, count: int, how: CombineSpec) -> None:
        tensors = [torch.zeros(4097, dtype=dtype) for _ in range(count)]
        combine_on_blocks(compile_as(case), tensors[0], tensors, how, compiled._BLOCK, soft_bfloat16=False)

    for name in op_names():
        op = get_op(name)
        combine(name, torch.float32 if torch.float32 in op.dtypes else torch.int32, 2, CombineSpec(op))
    total, mean = get_op("sum"), get_op("avg")
    combine("sum bfloat16", torch.bfloat16, 2, CombineSpec(total))
    combine("sum bool", torch.bool, 2, CombineSpec(total))
    combine("sum of 3 bfloat16", torch.bfloat16, 3, CombineSpec(total))
    combine("max float64", torch.float64, 2, CombineSpec(get_op("max")))
    combine("weighted float16", torch.float16, 2, CombineSpec(mean, weights=(3, 1)))
    combine("weighted float32", torch.float32, 2, CombineSpec(mean, weights=(16, 1)))
    combine("divided float32", torch.float32, 4, CombineSpec(mean, divisor=4))
    combine("divided float64", torch.float64, 3, CombineSpec(mean, divisor=3))
    tensor = torch.zeros(4097, dtype=torch.bfloat16)
    copy_on_blocks(compile_as("copy"), tensor, tensor, compiled._BLOCK)
    return facts


if __name__ == "__main__":
    ones = torch.ones(300)  # the interpreter patches Triton while it runs, and must leave no trace in what is compiled
    launcher_for(ones.device, "interpreter").combine(ones, [ones, ones, ones], CombineSpec(get_op("max")))
    driver.set_active(NamedTarget())
    print(json.dumps(compile_all()))

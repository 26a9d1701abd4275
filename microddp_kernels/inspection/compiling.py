"""Compiles one case with the real Triton compiler, without a GPU, and reads the facts off what came out."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from microddp_kernels.inspection.facts import Case, KernelFacts
from microddp_kernels.inspection.fused import count_fused
from microddp_kernels.inspection.launches import Launch, Moved, PlayedGpu, launch_case
from microddp_kernels.inspection.ptx import Kernel, parse_kernel
from microddp_kernels.inspection.sass import Signature, disassemble, resources, shortest_way
from microddp_kernels.inspection.trace import Access, Untraceable, trace

__all__ = ["inspect_case"]

_EVEN_NUMEL: Final = 2**18
"""Of this many elements every program has a full block, so that the elements of a program can be counted."""

_NUMEL: Final = _EVEN_NUMEL - 1
"""What is compiled for: it takes as many programs, and promises nothing, as one that divides by 16 would."""

_ON_FLOATS: Final = re.compile(r"\.b?f(?:16|32|64)")
_OFFSET: Final = re.compile(r"tt\.addptr .*, tensor<(?:\d+x)*i(\d+)")
_VECTOR_NBYTES: Final = 16
_MAX_TABLE_NBYTES: Final = 2**17


def inspect_case(gpu: PlayedGpu, case: Case, *, read_sass: bool) -> KernelFacts:
    """Compiles a case and reads it.

    Raises:
        Exception: whatever the launcher or Triton's compiler has to complain about.
    """
    even, _ = launch_case(gpu, case, _EVEN_NUMEL)
    rows = _EVEN_NUMEL / even.grid[0]
    launch, moved = launch_case(gpu, case, _NUMEL)
    kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    minimum = sum(each.tensor.nbytes for each in moved) / _NUMEL
    ptx = parse_kernel(kernel.asm["ptx"])
    num_threads = 32 * kernel.metadata.num_warps
    try:
        accesses, untraced = _accesses(kernel, ptx, launch, num_threads), ""
    except Untraceable as reason:
        accesses, untraced = [], str(reason)
    placed = [(each, place) for each in accesses if (place := _tensor_of(each, moved)) is not None]
    judged = [each for each, place in placed if moved[place].is_judged]
    stored = sum(each.distinct_nbytes for each, _ in placed if each.is_store)
    fused, contracted = count_fused(ptx, kernel.asm["llir"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        occupied = resources(cubin)
        code = disassemble(cubin) if read_sass else None
    way = shortest_way(code, _signature(accesses)) if code and accesses else None
    is_clear = code is not None and way is not None and way == shortest_way(code, _signature(accesses), spill_cost=2)
    count = None if code is None else len(code) if way is None else way
    stored_per_thread = (stored or minimum * rows / 3) / num_threads
    return KernelFacts(
        case=case,
        function=kernel.metadata.name,
        registers=occupied.registers,
        spills=None if code is None else sum(each.spills for each in code),
        spills_in_tail_only=is_clear,
        stack=occupied.stack,
        shared=max(occupied.shared, kernel.metadata.shared),
        load_bits=_narrowest([each for each in judged if not each.is_store]),
        store_bits=_narrowest([each for each in judged if each.is_store]),
        narrow=_num_narrow([(each, place) for each, place in placed if moved[place].is_judged]),
        bytes_per_element=sum(each.distinct_nbytes for each, _ in placed) / rows,
        minimum_bytes=minimum,
        moves_minimum=sum(each.distinct_nbytes for each in judged) / rows
        == sum(each.tensor.nbytes for each in moved if each.is_judged) / _NUMEL,
        instructions_per_16_bytes=None if count is None else round(count / (stored_per_thread / 16), 2),
        whole_kernel=code is not None and way is None,
        fused=fused,
        contracted=contracted,
        float_instructions=tuple(sorted({each.opcode for each in ptx.statements if _ON_FLOATS.search(each.opcode)})),
        offset_bits=min((int(each) for each in _OFFSET.findall(kernel.asm["ttir"])), default=64),
        untraced=untraced,
    )


def _accesses(kernel: Any, ptx: Kernel, launch: Launch, num_threads: int) -> list[Access]:
    """What the second program asks for, which is neither the first nor the last, and whose block is full."""
    by_name = {**dict(zip(launch.kernel.arg_names, launch.arguments)), **launch.options}
    arguments: list[int | None] = []
    tables: dict[int, bytes] = {}
    for name, kind in kernel.src.signature.items():
        _flatten(kind, by_name[name], arguments, tables)
    return trace(
        ptx,
        arguments,
        num_threads=num_threads,
        program=1,
        num_programs=launch.grid[0],
        memory=tables,
    )


def _flatten(kind: Any, value: Any, arguments: list[int | None], tables: dict[int, bytes]) -> None:
    """Appends what reaches the kernel as parameters: addresses and integers, None for floats; constants do not."""
    if isinstance(kind, tuple):
        for each_kind, each in zip(kind, value):
            _flatten(each_kind, each, arguments, tables)
    elif kind.startswith("*"):
        arguments.append(value.data_ptr())
        if not value.dtype.is_floating_point and value.nbytes <= _MAX_TABLE_NBYTES:
            tables[value.data_ptr()] = value.numpy().tobytes()
    elif kind != "constexpr":
        arguments.append(int(value) if kind[0] in "iu" else None)


def _tensor_of(access: Access, moved: Sequence[Moved]) -> int | None:
    """Which of the tensors is accessed; None: a table."""
    for index, each in enumerate(moved):
        if 0 <= access.addresses[0] - each.tensor.data_ptr() < each.tensor.nbytes:
            return index
    return None


def _narrowest(accesses: Sequence[Access]) -> int:
    return 8 * min((each.nbytes for each in accesses), default=0)


def _num_narrow(accesses: Sequence[tuple[Access, int]]) -> int:
    """The accesses of less than 16 bytes, and of less than a thread's share of the tensor."""
    shares: Counter[tuple[int, bool]] = Counter()
    for access, place in accesses:
        shares[place, access.is_store] += access.nbytes
    return sum(access.nbytes < min(_VECTOR_NBYTES, shares[place, access.is_store]) for access, place in accesses)


def _signature(accesses: Sequence[Access]) -> Signature:
    counts = Counter(("store" if each.is_store else "load", each.nbytes) for each in accesses)
    return tuple(sorted((kind, nbytes, count) for (kind, nbytes), count in counts.items()))

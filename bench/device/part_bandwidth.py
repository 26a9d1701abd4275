"""GB/s of the kernels that combine and copy, beside torch's copy and addition on the same buffers.

Bytes are counted as they must move: each operand read once, each result written once; 1 GB is 10^9 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from bench.device.records import Context
from bench.device.timing import medians_us
from microddp_kernels import CombineSpec, get_op, launcher_for
from microddp_kernels.launchers import Launcher

__all__ = ["Rotation", "contestants", "measure", "run"]

MIB: Final = 1 << 20
_SIZES: Final = (64 * MIB, 256 * MIB, 1024 * MIB, 2048 * MIB)
_PAST_CACHE: Final = 640 * MIB
"""Before a buffer is used again, at least so many bytes of others are."""

_MOST: Final = 24 << 30
_SHARE_OF_FREE: Final = 0.7
_ROUNDS: Final = 20
_COLUMNS: Final = 4096
_SHOWN: Final = ("combine f32", "combine bf16", "fold4 f32", "copy f32", "transposed f32", "f32 to bf16")


class Rotation:
    """Buffers of one size, cut out of one allocation: asked for in turn, so that none is in the cache."""

    def __init__(self, pool: torch.Tensor, nbytes: int) -> None:
        """``pool``: 1-D, of bytes; ``nbytes``: of one buffer."""
        wanted = max(10, -(-_PAST_CACHE // nbytes))
        count = min(wanted, pool.numel() // nbytes)
        self.buffers = [pool[number * nbytes : (number + 1) * nbytes] for number in range(count)]
        self._next = 0

    def take(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The next ``count`` buffers."""
        taken = [self.buffers[(self._next + each) % len(self.buffers)].view(dtype) for each in range(count)]
        self._next += count
        return taken


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    Attributes:
        run: works on the buffers that it takes.
        moved: bytes read and written for each byte of the size.
        rival: torch's way to do the same.
    """

    run: Callable[[int], object]
    moved: float
    rival: str


def run(context: Context) -> None:
    """Every size that fits the memory, then what was found for the largest."""
    device = torch.device("cpu") if context.stand_in else torch.device("cuda", 0)
    sizes: tuple[int, ...] = (MIB,) if context.stand_in else _SIZES
    if context.stand_in:
        pool = torch.empty(12 * MIB, dtype=torch.uint8)
    else:
        torch.cuda.set_device(0)
        free, _ = torch.cuda.mem_get_info(device)
        pool = torch.empty(min(_MOST, int(free * _SHARE_OF_FREE)) // MIB * MIB, dtype=torch.uint8, device=device)
    for start in range(0, pool.numel(), 1 << 30):  # zeros could be faster than numbers
        pool[start : start + (1 << 30)].view(torch.float32).normal_()
    fitting = [size for size in sizes if 6 * size <= pool.numel()]
    launcher = launcher_for(device)
    context.step("right results")
    wrong = _check(launcher, Rotation(pool, sizes[0]))
    context.check("what is timed is right", not wrong, wrong)
    for number, size in enumerate(fitting):
        context.step(f"{size // MIB} MiB")
        seconds = context.left() / (len(fitting) - number) - 0.5
        measure(context, launcher, pool, size, time.monotonic() + seconds, device)
    if len(fitting) < len(sizes):
        context.summary(f"largest size left out: {pool.numel() / 2**30:.0f} GiB to be had")


def measure(
    context: Context, launcher: Launcher, pool: torch.Tensor, size: int, deadline: float, device: torch.device
) -> None:
    """Times everything at one size; reports GB/s, and the ratio to torch's way and to a device-to-device copy."""
    entries = contestants(launcher, Rotation(pool, size))
    medians = medians_us({name: each.run for name, each in entries.items()}, _ROUNDS, deadline, device)
    if device.type != "cuda":
        return  # no figure without a device
    rates = {name: entries[name].moved * size / (time_us * 1e3) for name, time_us in medians.items()}
    copy = rates["torch copy_"]
    for name, rate in rates.items():
        rival = rates.get(entries[name].rival)
        ratios = {"to_copy": rate / copy, "to_torch": rate / rival if rival else None}
        context.figure(f"{size // MIB} MiB {name}", rate, "GB/s", time_us=medians[name], **ratios)
    shown = (f"{name} {rates[name]:.0f} ({rates[name] / rates[entries[name].rival]:.2f})" for name in _SHOWN)
    torchs = f"copy_ {copy:.0f}, add {rates['torch add f32']:.0f}"
    context.summary(f"{size // MIB} MiB, GB/s (ratio to torch's): {torchs}; {', '.join(shown)}")


def contestants(launcher: Launcher, rotation: Rotation) -> dict[str, Contestant]:
    """What is timed, ours and torch's in turn."""
    total = CombineSpec(get_op("sum"))

    def combine(dtype: torch.dtype, num_operands: int) -> Callable[[int], object]:
        def call(number: int) -> None:
            out, *operands = rotation.take(dtype, num_operands + 1)
            launcher.combine(out, operands, total)

        return call

    def add(dtype: torch.dtype) -> Callable[[int], object]:
        def call(number: int) -> None:
            out, first, second = rotation.take(dtype, 3)
            torch.add(first, second, out=out)

        return call

    float32, bfloat16 = torch.float32, torch.bfloat16
    return {
        "torch copy_": Contestant(_copying(rotation, _plain, _torch_copy), 2, "torch copy_"),
        "copy f32": Contestant(_copying(rotation, _plain, launcher.copy), 2, "torch copy_"),
        "torch add f32": Contestant(add(float32), 3, "torch add f32"),
        "combine f32": Contestant(combine(float32, 2), 3, "torch add f32"),
        "torch add bf16": Contestant(add(bfloat16), 3, "torch add bf16"),
        "combine bf16": Contestant(combine(bfloat16, 2), 3, "torch add bf16"),
        "fold4 f32": Contestant(combine(float32, 4), 5, "torch add f32"),
        "torch transposed f32": Contestant(_copying(rotation, _transposed, _torch_copy), 2, "torch transposed f32"),
        "transposed f32": Contestant(_copying(rotation, _transposed, launcher.copy), 2, "torch transposed f32"),
        "torch f32 to bf16": Contestant(_copying(rotation, _narrowed, _torch_copy), 1.5, "torch f32 to bf16"),
        "f32 to bf16": Contestant(_copying(rotation, _narrowed, launcher.copy), 1.5, "torch f32 to bf16"),
    }


Pair = tuple[torch.Tensor, torch.Tensor]


def _copying(
    rotation: Rotation, view: Callable[[list[torch.Tensor]], Pair], copy: Callable[[torch.Tensor, torch.Tensor], object]
) -> Callable[[int], object]:
    return lambda number: copy(*view(rotation.take(torch.float32, 2)))


def _torch_copy(out: torch.Tensor, source: torch.Tensor) -> None:
    out.copy_(source)


def _plain(pair: list[torch.Tensor]) -> Pair:
    return pair[0], pair[1]


def _transposed(pair: list[torch.Tensor]) -> Pair:
    return pair[0].view(_COLUMNS, -1), pair[1].view(-1, _COLUMNS).t()


def _narrowed(pair: list[torch.Tensor]) -> Pair:
    return pair[0].view(torch.bfloat16)[: pair[1].numel()], pair[1]


def _check(launcher: Launcher, rotation: Rotation) -> str:
    """Each of the launcher's results against torch's, once."""
    out, first, second, third, fourth = rotation.take(torch.float32, 5)
    total = CombineSpec(get_op("sum"))
    launcher.combine(out, [first, second], total)
    texts = [] if torch.equal(out, first + second) else ["combine"]
    launcher.combine(out, [first, second, third, fourth], total)
    texts += [] if torch.equal(out, first + second + third + fourth) else ["fold4"]
    for name, view in (("copy", _plain), ("transposed", _transposed), ("f32 to bf16", _narrowed)):
        target, source = view([out, first])
        launcher.copy(target, source)
        texts += [] if torch.equal(target, source.to(target.dtype)) else [name]
    return f"wrong: {', '.join(texts)}" if texts else ""

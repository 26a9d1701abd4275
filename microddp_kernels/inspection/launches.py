"""Has the compiled launcher launch a kernel on tensors of the CPU, and takes down what it would have launched.

What is launched is what the launcher itself decides: nothing here repeats how it chooses kernels, blocks and options.
To that end the GPU is played: in a process of its own, because torch and Triton are patched for good.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from microddp_kernels.inspection.cases import DTYPES, load_operator
from microddp_kernels.inspection.facts import Case
from microddp_kernels.launchers import compiled
from microddp_kernels.launchers.checks import lanes_of
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["Launch", "Moved", "PlayedGpu", "launch_case"]

_WIDTH: Final = 64
"""Elements of a row of a wide lane."""

Played = Callable[[Any, ReduceOp | None, tuple[torch.dtype, ...], int], Sequence[torch.Tensor]]
"""``(launcher, op, dtypes, numel)`` launches on ``numel`` elements (rows) and returns the tensors that it moves."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that did not happen.

    Attributes:
        kernel: the ``@triton.jit`` function.
        grid: the number of programs.
        arguments, options: as they were passed, constants among the options.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class PlayedGpu:
    """Stands in for the driver of a GPU that is not there: it names the architecture, and launches are taken down."""

    def __init__(self) -> None:
        self.arch = 0
        self.launches: list[Launch] = []

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """A number for each architecture: Triton keeps what it has compiled by it."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def install(self) -> None:
        """Makes Triton and the compiled launcher see this GPU. Cannot be undone."""
        driver.set_active(self)
        run = JITFunction.run

        def played_run(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if warmup:
                return run(function, *arguments, grid=grid, warmup=True, **options)
            self.launches.append(Launch(function, tuple(grid), arguments, options))
            return None

        JITFunction.run = played_run
        vars(compiled)["check_devices"] = _check_nothing
        vars(torch.cuda).update(
            device=_no_context,
            stream=_no_context,
            current_stream=_PlayedStream,
            Event=_PlayedEvent,
            get_device_capability=lambda device=None: divmod(self.arch, 10),
        )

    def turn_into(self, arch: int) -> None:
        """From here on it is a GPU of another architecture, of which nothing is remembered."""
        self.arch, self.launches = arch, []
        for each in vars(compiled).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


class _PlayedEvent:
    def record(self, stream: Any = None) -> None:
        """Nothing runs, so nothing ends."""


class _PlayedStream:
    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = 0


def _no_context(which: Any = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _check_nothing(launcher: str, device_type: str, *tensors: torch.Tensor) -> None:
    """In place of the check that all tensors are on a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A tensor that a kernel reads or writes; ``is_judged``: the rules hold for it."""

    tensor: torch.Tensor
    is_judged: bool


def launch_case(gpu: PlayedGpu, case: Case, numel: int) -> tuple[Launch, list[Moved]]:
    """What the launcher launches for ``numel`` elements (rows, if a lane is wide), and the tensors that it moves.

    If a lane is wide, the others are not judged: they are few bytes, and a thread has them element by element.

    Raises:
        TypeError, ValueError: the launcher refuses.
        RuntimeError: it launches no kernel, or several.
    """
    gpu.turn_into(case.arch)
    op = load_operator(case.operator) if case.operator else None
    dtypes = tuple(DTYPES[name] for name in case.dtypes)
    if ":" in case.kernel:
        module, _, name = case.kernel.partition(":")
        play: Played = getattr(importlib.import_module(module), name)
    else:
        play = _PLAYS[case.kernel]
    moved = play(compiled.CompiledLauncher(), op, dtypes, numel)
    if len(gpu.launches) != 1:
        raise RuntimeError(f"{case.text}: expected one launch, found {len(gpu.launches)}")
    has_wide = op is not None and any(lane.wide for lane in op.lanes)
    return gpu.launches[0], [Moved(each, not has_wide or each.numel() > numel) for each in moved]


def _values(op: ReduceOp, dtypes: tuple[torch.dtype, ...], numel: int) -> Values:
    if not op.lanes:
        return torch.empty(numel, dtype=dtypes[0])
    widths = (_WIDTH if lane.wide else 1 for lane in op.lanes)
    return tuple(torch.empty(numel * width, dtype=dtype) for dtype, width in zip(dtypes, widths))


def _combining(num_operands: int, spec: Callable[[ReduceOp], CombineSpec] = CombineSpec) -> Played:
    def play(launcher: Any, op: ReduceOp | None, dtypes: tuple[torch.dtype, ...], numel: int) -> list[torch.Tensor]:
        assert op is not None
        out, *operands = [_values(op, dtypes, numel) for _ in range(num_operands + 1)]
        launcher.combine(out, operands, spec(op))
        return [lane for each in (out, *operands) for lane in lanes_of(each)]

    return play


def _play_wire(
    launcher: Any, op: ReduceOp | None, dtypes: tuple[torch.dtype, ...], numel: int
) -> tuple[torch.Tensor, ...]:
    assert op is not None
    own, travelled = dtypes
    out, first, second = (torch.empty(numel, dtype=dtype) for dtype in (own, own, travelled))
    launcher.combine(out, [first, second], CombineSpec(op))
    return out, first, second


def _play_copy(
    launcher: Any, op: ReduceOp | None, dtypes: tuple[torch.dtype, ...], numel: int
) -> tuple[torch.Tensor, ...]:
    out, source = torch.empty(numel, dtype=dtypes[0]), torch.empty(numel, dtype=dtypes[-1])
    launcher.copy(out, source)
    return out, source


def _play_strided(
    launcher: Any, op: ReduceOp | None, dtypes: tuple[torch.dtype, ...], numel: int
) -> tuple[torch.Tensor, ...]:
    num_columns = 3591 if numel % 3591 == 0 else 4096  # so long that the second program has a full tile
    out = torch.empty(numel // num_columns, num_columns, dtype=dtypes[0])
    source = torch.empty(num_columns, numel // num_columns, dtype=dtypes[0])
    launcher.copy(out, source.t())
    return out, source


def _packed(dtypes: tuple[torch.dtype, ...], numel: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A long tensor and a shorter one, and room for both."""
    parts = [torch.empty(numel // 2, dtype=dtypes[0]), torch.empty(numel - numel // 2, dtype=dtypes[0])]
    return torch.empty(numel, dtype=dtypes[0]), parts


def _play_pack(
    launcher: Any, op: ReduceOp | None, dtypes: tuple[torch.dtype, ...], numel: int
) -> tuple[torch.Tensor, ...]:
    out, parts = _packed(dtypes, numel)
    launcher.pack(out, parts)
    return out, *parts


def _play_unpack(
    launcher: Any, op: ReduceOp | None, dtypes: tuple[torch.dtype, ...], numel: int
) -> tuple[torch.Tensor, ...]:
    source, parts = _packed(dtypes, numel)
    launcher.unpack(parts, source)
    return source, *parts


_PLAYS: Final[dict[str, Played]] = {
    "combine": _combining(2),
    "fold": _combining(4),
    "finish": _combining(4, lambda op: CombineSpec(op, divisor=4)),
    "weighted": _combining(2, lambda op: CombineSpec(op, weights=(3, 1))),
    "wire": _play_wire,
    "copy": _play_copy,
    "convert": _play_copy,
    "strided": _play_strided,
    "pack": _play_pack,
    "unpack": _play_unpack,
}

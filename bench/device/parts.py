"""The parts of the device check, cheapest and most informative first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: as ``--parts`` takes it.
        function: "module:function", called with a ``Context`` in a process of its own.
        weight: its share of the time, relative to those of the parts that are still to come.
        title: what it shows, for ``--help``.
        prepare: "module:function", called before its time starts, perhaps while another part runs.
        needs_device: it says so where there is none.
        stands_in: on a stand-in it shows that its code runs.
        is_timing: what others do at the same time would show in its figures.
    """

    name: str
    function: str
    weight: float
    title: str
    prepare: str = ""
    needs_device: bool = True
    stands_in: bool = False
    is_timing: bool = False


def _part(name: str, weight: float, title: str, prepares: bool = False, **more: bool) -> Part:
    module = f"bench.device.part_{name}"
    return Part(name, f"{module}:run", weight, title, f"{module}:prepare" if prepares else "", **more)


PARTS: Final = (
    _part("environment", 16, "versions, GPU, and one compiled kernel", needs_device=False, stands_in=True),
    _part("self_exchange", 14, "one rank's NCCL send and receive to itself by CuPy's bindings; streams, graphs"),
    _part("launchers", 40, "compiled kernels against the eager launcher, bit for bit", True, stands_in=True),
    _part("ranks", 32, "2, 3 and 4 ranks on one GPU: algorithms, types, torch and CuPy", True, stands_in=True),
    _part("graph", 12, "capture_all_reduce, and all_reduce captured by the user", True, stands_in=True),
    _part("streams", 10, "the caller's stream is waited on; temporaries that are freed early", True),
    _part("bandwidth", 18, "GB/s of the kernels beside a device-to-device copy and torch.add", is_timing=True),
    _part("host", 12, "host time of an all_reduce, with and without a graph", True, is_timing=True),
    _part("nvtx", 10, "the ranges that torch's profiler sees", True, stands_in=True),
)

"""A device runtime that takes CuPy's arrays, over host memory, and has a stream for them that is not torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.nccl.standin_arrays import as_cupy, as_tensor
from tests.nccl.standin_runtime import StandInRuntime

__all__ = ["LAYOUTS", "CupyRuntime", "Layout", "NumPyArray", "host_view"]

NumPyArray = np.ndarray[Any, Any]
Layout = tuple[tuple[int, ...], Callable[[Any], Any]]

LAYOUTS: dict[str, Layout] = {
    # name: (shape of the array that is allocated, the view of it that is passed); of NumPy's and CuPy's alike
    "contiguous": ((4, 3), lambda array: array),
    "offset": ((5, 3), lambda array: array[1:]),
    "Fortran": ((3, 4), lambda array: array.T),
    "every other": ((4, 6), lambda array: array[:, ::2]),
    "column": ((12, 3), lambda array: array[:, 1]),
    "reversed": ((12,), lambda array: array[::-1]),
    "reversed, every other": ((4, 6), lambda array: array[::-1, ::-2]),
    "reversed Fortran": ((3, 4), lambda array: array.T[::-1]),
    "no dimension": ((), lambda array: array),
    "one of many": ((3,), lambda array: array[1:2].reshape(())),
    "empty": ((0, 3), lambda array: array),
}


class CupyRuntime(StandInRuntime):
    """As on a device, CuPy's arrays are worked on in CuPy's stream, ``cupy_stream``, and all else in ``default``.

    Without ``blocking`` neither is the host.
    """

    def __init__(self, *, blocking: bool = True) -> None:
        super().__init__(blocking=blocking)
        self.cupy_stream = self.default if blocking else self.new_stream()

    def caller_stream(self, array: Any = None) -> Any:
        if type(array).__module__.partition(".")[0] == "cupy" and not getattr(self._current, "stack", []):
            return self.cupy_stream
        return super().caller_stream(array)

    def from_cupy(self, array: Any) -> torch.Tensor:
        """In place of DLPack, which asks the driver where the memory is."""
        return as_tensor(array)

    def to_cupy(self, tensor: torch.Tensor) -> Any:
        return as_cupy(tensor)


def host_view(array: Any) -> NumPyArray:
    """The memory of a CuPy array as NumPy sees it, any strides."""
    flips = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides) if array.size else ()
    forward: NumPyArray = as_tensor(array[flips] if flips else array).numpy()
    return forward[flips] if flips else forward

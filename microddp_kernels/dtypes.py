"""The element types by kind, and their names in texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

__all__ = ["BITS_OF", "BOOL", "COMPLEX", "FLOATS", "FLOATS8", "INTEGERS", "NARROW_FLOATS", "UNSIGNED", "dtype_names"]

FLOATS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
FLOATS8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
NARROW_FLOATS: Final = FLOATS8 | {torch.bfloat16, torch.float16}
"""The floats that are combined in float32."""

INTEGERS: Final = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
UNSIGNED: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""The integers on which torch's CPU kernels know no arithmetic."""

COMPLEX: Final = frozenset({torch.complex64, torch.complex128})
BOOL: Final = frozenset({torch.bool})

BITS_OF: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: the integer type in which torch computes on its bits."""


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """The names of ``dtypes`` without their module, sorted: ``"bfloat16, float16"``."""
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))

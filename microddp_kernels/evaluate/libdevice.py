"""CUDA's libdevice functions (``triton.language.extra.libdevice``) on values of float32 and float64.

As there, operands are of one type. Approximate functions (``fast_expf``) give the accurate result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from microddp_kernels.evaluate.element_types import FP32, FP64, INT1, INT32
from microddp_kernels.evaluate.exact import float_remainder, fused_multiply_add, square_root
from microddp_kernels.evaluate.value import Value, as_value

__all__ = ["LIBDEVICE"]

Tensors = Callable[..., torch.Tensor]


def _function(apply: Tensors, *legal: Any, result: Any = None) -> Callable[..., Value]:
    """``apply`` on the tensors of values that are all of one of the ``legal`` types."""
    types = legal or (FP32, FP64)

    def function(*operands: Any) -> Value:
        values = [as_value(operand) for operand in operands]
        dtype = values[0].dtype
        if dtype not in types or any(value.dtype is not dtype for value in values):
            given = ", ".join(str(value.dtype) for value in values)
            raise TypeError(f"a libdevice function takes {' or '.join(map(str, types))} operands, got {given}")
        found = apply(*(value.tensor for value in values))
        return Value(found, dtype) if result is None else Value(found.to(_STORED[result.name]), result)

    return function


_STORED: Final = {"int1": torch.bool, "int32": torch.int32}


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest integer, halves away from zero. (x + 0.5 would round already.)"""
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.copysign(torch.ones_like(x), x), whole)


def _cube_root(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    guess = torch.copysign(wide.abs().pow(1 / 3), wide)
    square = guess * guess
    better = guess - (guess - wide / square) / 3  # one of Newton's steps: pow is off by its rounded exponent
    return torch.where((guess == 0) | ~torch.isfinite(better), guess, better).to(x.dtype)


def _turned(x: torch.Tensor, apply: Tensors) -> torch.Tensor:
    """``apply(pi * x)``, of what remains of ``x`` after whole turns, which is exact."""
    wide = x.double()
    return apply((wide - 2 * torch.round(wide / 2)) * math.pi).to(x.dtype)


def _length(*parts: torch.Tensor) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = torch.hypot(total, part)
    return torch.abs(total)


def _power(base: Any, exponent: Any) -> Value:
    first, second = as_value(base), as_value(exponent)
    if second.dtype is INT32 and first.dtype in (FP32, FP64):
        return Value(torch.pow(first.tensor, second.tensor.to(first.tensor.dtype)), first.dtype)
    return _function(torch.pow)(first, second)


def _scaled(x: Any, exponent: Any) -> Value:
    """``x * 2**exponent``."""
    value, power = as_value(x), as_value(exponent)
    if power.dtype is not INT32 or value.dtype not in (FP32, FP64):
        raise TypeError(f"ldexp takes a float32 or float64 and an int32, got {value.dtype}, {power.dtype}")
    wide, left = value.tensor.double(), power.tensor.long()
    for _ in range(3):  # the powers that are normal numbers; what is left after the third gives 0 or infinity anyway
        step = left.clamp(-1022, 1023)
        wide, left = wide * ((step + 1023) << 52).view(torch.float64), left - step
    return Value(wide.to(value.tensor.dtype), value.dtype)


_UNARY: Final[dict[str, Tensors]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "cbrt": _cube_root,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "cospi": lambda x: _turned(x, torch.cos),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp10": lambda x: torch.pow(10.0, x.double()).to(x.dtype),
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "lgamma": torch.lgamma,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": lambda x: torch.where(x.abs() < 1e-30, x, torch.log1p(x)),  # torch takes tiny numbers for +0
    "log2": torch.log2,
    "nearbyint": torch.round,
    "normcdf": lambda x: (torch.erfc(x.double() / -math.sqrt(2)) / 2).to(x.dtype),
    "rcbrt": lambda x: (1 / _cube_root(x.double())).to(x.dtype),
    "rcp_rn": torch.reciprocal,
    "rint": torch.round,
    "round": _rounded,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sinpi": lambda x: _turned(x, torch.sin),
    "sqrt": square_root,
    "sqrt_rn": square_root,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}
_BINARY: Final[dict[str, Tensors]] = {
    "add_rn": torch.add,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "div_rn": torch.true_divide,
    "fdim": lambda x, y: torch.where((x > y) | torch.isnan(x) | torch.isnan(y), x - y, torch.zeros_like(x)),
    "fmod": float_remainder,
    "hypot": torch.hypot,
    "mul_rn": torch.mul,
    "nextafter": torch.nextafter,
    "norm3d": _length,
    "norm4d": _length,
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    "sub_rn": torch.sub,
}
_FAST: Final[dict[str, Tensors]] = {
    "fast_cosf": torch.cos,
    "fast_dividef": torch.true_divide,
    "fast_exp10f": lambda x: torch.pow(10.0, x.double()).float(),
    "fast_expf": torch.exp,
    "fast_log10f": torch.log10,
    "fast_log2f": torch.log2,
    "fast_logf": torch.log,
    "fast_powf": torch.pow,
    "fast_sinf": torch.sin,
    "fast_tanf": torch.tan,
    "fast_tanhf": torch.tanh,
    "saturatef": lambda x: torch.nan_to_num(x, nan=0.0).clamp(0, 1),
}

LIBDEVICE: Final[dict[str, Any]] = {
    **{name: _function(apply) for name, apply in (_UNARY | _BINARY).items()},
    **{name: _function(apply, FP32) for name, apply in _FAST.items()},
    "finitef": _function(torch.isfinite, FP32, result=INT1),
    "fma": _function(lambda x, y, z: fused_multiply_add(x, y, z, FP32 if x.dtype == torch.float32 else FP64)),
    "isfinited": _function(torch.isfinite, FP64, result=INT1),
    "isinf": _function(torch.isinf, result=INT1),
    "isnan": _function(torch.isnan, result=INT1),
    "ldexp": _scaled,
    "pow": _power,
    "scalbn": _scaled,
    "signbit": _function(torch.signbit, result=INT32),
}
"""By name in ``triton.language.extra.libdevice``."""

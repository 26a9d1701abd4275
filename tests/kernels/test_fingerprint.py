"""Operators that compute something else have another fingerprint, and equal ones the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from microddp_kernels.declare import reduce_op
from microddp_kernels.fingerprint import fingerprint
from tests.kernels import user_ops

pytestmark = pytest.mark.timeout(60)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_PARTS = {
    "constant": "2.0",
    "scale": "4.0",
    "enclosed": "5",
    "default": "1",
    "folded": "x + 1",
    "helper": "x * 2",
    "body": "helper(a) + b * C + scale.S + type(b, K)",
    "type": "tl.float32",
    "torch": "7.0",
}
_OTHERS = {
    "constant": "2.5",
    "scale": "4.5",
    "enclosed": "6",
    "default": "2",
    "folded": "x + 2",
    "helper": "x * 3",
    "body": "helper(a) - b * C + scale.S + type(b, K)",
    "type": "tl.float64",
    "torch": "8.0",
}
_SOURCE = """
import torch
import triton
import triton.language as tl

import {module}_scale as scale

C = tl.constexpr({constant})
K = tl.constexpr({type})
T = {torch}


@triton.constexpr_function
def folded(x):
    return {folded}


@triton.jit
def helper(x, factor: tl.constexpr = {default}):
    return {helper} + folded(1)


@triton.jit
def type(x, kind: tl.constexpr):
    return x.to(kind).to(tl.float32)


def make():
    enclosed = tl.constexpr({enclosed})

    @triton.jit
    def op(a, b):
        return {body} + enclosed

    return op


op = make()


def in_torch(a, b):
    return a + b * T
"""


def _fingerprint(directory: Path, module: str, **more: Any) -> str:
    """Of an operator that always has the same name."""
    parts = _PARTS | {key: value for key, value in more.items() if key in _PARTS}
    (directory / f"{module}_scale.py").write_text(
        f"import triton.language as tl\n\nS = tl.constexpr({parts['scale']})\n"
    )
    (directory / f"{module}.py").write_text(_SOURCE.format(module=module, **parts))
    sys.path.insert(0, str(directory))
    try:
        found = _imported(directory / f"{module}.py")
    finally:
        sys.path.remove(str(directory))
    laws = {key: value for key, value in more.items() if key not in _PARTS}
    functions = ((found.op, None), (found.in_torch, None), ("name", sorted(laws.items())))
    return fingerprint(*functions)


def test_fingerprints_tell_everything_that_is_computed_apart(tmp_path: Path) -> None:
    usual = _fingerprint(tmp_path, "usual")
    assert usual == _fingerprint(tmp_path, "again")
    prints = {key: _fingerprint(tmp_path, f"with_{key}", **{key: value}) for key, value in _OTHERS.items()}
    assert len({usual, *prints.values()}) == 1 + len(prints), prints


def test_fingerprints_tell_laws_and_functions_apart() -> None:
    prints = [
        reduce_op(name="fingerprinted", **declared)(user_ops.largest).fingerprint
        for declared in (
            {},
            {"commutative": True},
            {"dtypes": "floats"},
            {"torch_function": _imported},
            {"nan": "ignore"},
        )
    ]
    prints.append(reduce_op(name="fingerprinted", commutative=True)(user_ops.largest).fingerprint)
    assert len(set(prints)) == 5 and prints[-1] == prints[1]

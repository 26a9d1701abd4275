"""The PTX of the kernels: 128-bit accesses, no contraction, correctly rounded division, 64-bit offsets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microddp_kernels import op_names

pytestmark = pytest.mark.timeout(120)

WIDE_LOADS = ("ld.global.v4.b32", "ld.global.v2.b64")
NUM_THREADS = 128
BLOCK = 2048
OTHERS = {  # case: operands, bytes an element
    "sum bfloat16": (2, 2),
    "sum bool": (2, 1),
    "sum of 3 bfloat16": (3, 2),
    "max float64": (2, 8),
    "weighted float16": (2, 2),
    "weighted float32": (2, 4),
    "divided float32": (4, 4),
    "divided float64": (3, 8),
    "copy": (1, 2),
}
CASES = {**dict.fromkeys(op_names(), (2, 4)), **OTHERS}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "0"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sm90.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    assert found.keys() == CASES.keys()
    return found


@pytest.mark.parametrize("case", CASES)
def test_full_blocks_are_read_and_written_in_128_bits(facts: dict[str, Any], case: str) -> None:
    """Exactly as many wide accesses as a full block needs, and exactly as many narrow ones as the masked tail needs."""
    num_operands, itemsize = CASES[case]
    ptx = facts[case]["ptx"]
    elements = BLOCK // NUM_THREADS
    wide = elements * itemsize // 16
    loads = {name: count for name, count in ptx.items() if name.startswith("ld.global")}
    stores = {name: count for name, count in ptx.items() if name.startswith("st.global")}
    narrow = f".b{8 * itemsize}"
    assert sum(loads.pop(name, 0) for name in WIDE_LOADS) == num_operands * wide
    assert loads == {f"ld.global{narrow}": num_operands * elements}
    assert sum(stores.pop(name.replace("ld", "st"), 0) for name in WIDE_LOADS) == wide
    assert stores == {f"st.global{narrow}": elements}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_contracted_and_offsets_have_64_bits(facts: dict[str, Any], case: str) -> None:
    ptx = facts[case]["ptx"]
    assert not [name for name in ptx if name.startswith(("fma", "mad.f", "mad.rn"))]
    assert facts[case]["offsets"] == ["i64"]


@pytest.mark.parametrize("case", CASES)
def test_division_is_correctly_rounded(facts: dict[str, Any], case: str) -> None:
    divisions = {name for name in facts[case]["ptx"] if name.startswith("div")}
    divides = case.startswith(("weighted", "divided"))
    assert divisions == ({f"div.rn.f{64 if case.endswith('64') else 32}"} if divides else set())


def test_nan_propagates_through_the_maximum(facts: dict[str, Any]) -> None:
    assert "max.NaN.f32" in facts["max"]["ptx"]


def test_bfloat16_is_rounded_by_the_hardware(facts: dict[str, Any]) -> None:
    assert "cvt.rn.bf16x2.f32" in facts["sum of 3 bfloat16"]["ptx"]

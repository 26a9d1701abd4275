"""What the transport takes CuPy's NCCL bindings to do, tried on the real library without a GPU; and on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.nccl.build import REPOSITORY, STANDIN_VERSION, why_no_cupy
from tests.nccl.contract_findings import find

pytestmark = pytest.mark.timeout(60)

Findings = dict[str, Any]


@pytest.fixture(scope="module")
def real() -> Findings:
    """The findings about the real library, which only a process of its own can load."""
    reason = why_no_cupy()
    if reason is not None:
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    command = [sys.executable, "-m", "tests.nccl.contract_findings"]
    child = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=50, check=False
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    if found is None:
        pytest.skip("CuPy finds no NCCL: pip install 'microddp[cuda12]'")
    return dict(found)


@pytest.fixture(params=["real", "stand-in"])
def found(request: pytest.FixtureRequest) -> Findings:
    """The findings about the one and the other."""
    if request.param == "real":
        return dict(request.getfixturevalue("real"))
    request.getfixturevalue("standin")
    from cupy.cuda import nccl

    return find(nccl)


def test_the_real_library_is_the_real_one(real: Findings) -> None:
    assert 20800 <= real["version"] < STANDIN_VERSION


def test_importing_and_asking_touches_no_device(real: Findings) -> None:
    assert real["cuda initialised"] is False


def test_ids_are_128_bytes_and_never_the_same(found: Findings) -> None:
    assert found["ids"] == [["bytes", 128]] * 3 and found["distinct ids"] == 3


def test_the_type_of_raw_bytes(found: Findings) -> None:
    assert found["uint8"] == 1  # ncclUint8


@pytest.mark.parametrize(
    ("sequence", "outcomes"),
    [
        ("balanced", ["ok", "ok", "NcclError 5"]),
        ("nested", ["ok", "ok", "ok", "ok", "NcclError 5"]),
        ("bad call", ["ok", "NcclError 4", "NcclError 4", "NcclError 5"]),
        ("bad call, nested", ["ok", "ok", "NcclError 4", "ok", "NcclError 4", "NcclError 5"]),
        ("bad call outside a group", ["NcclError 4", "NcclError 5"]),
        ("other thread", ["ok", "ok", "ok"]),
    ],
)
def test_groups(sequence: str, outcomes: list[str], found: Findings) -> None:
    """Depth belongs to a thread; a bad call is told at once and again at the outermost end, which closes the group."""
    assert found["groups"][sequence] == outcomes


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ("integers", "NcclError 4"),  # they reach NCCL, which refuses the communicator
        ("stream None", "TypeError"),
        ("memory None", "TypeError"),
        ("memory a float", "TypeError"),
        ("count a float", "NcclError 4"),  # taken: CuPy cuts it off
        ("count negative", "OverflowError"),
        ("type a text", "TypeError"),
        ("peer beyond 32 bits", "OverflowError"),
    ],
)
def test_what_is_taken_for_an_integer(arguments: str, outcome: str, found: Findings) -> None:
    assert found["conversions"][arguments] == outcome


def test_result_codes(found: Findings) -> None:
    """7 (in progress) and 8 are not known to CuPy: they surface as KeyError, which must be caught too."""
    assert found["statuses"] == ["ok", *(f"NcclError {status}" for status in range(1, 7)), "KeyError", "KeyError"]


def test_errors_carry_their_status_and_pickle(found: Findings) -> None:
    name, is_runtime_error, status, text, status_of_copy = found["error"]
    assert (name, is_runtime_error, status, status_of_copy) == ("NcclError", True, 5, 5)
    assert text.startswith("NCCL_ERROR_INVALID_USAGE: invalid usage")


def test_there_is_neither_a_timeout_nor_a_nonblocking_mode(found: Findings) -> None:
    """Hence the watchdog. If this fails, CuPy has more to offer than the transport uses."""
    assert found["config"] == ["split_share"]


def test_communicators_without_a_handle(found: Findings) -> None:
    """As they are after an abort: asking is refused, ending them again does nothing, and none can be pickled."""
    outcomes = {name: outcome for name, (outcome, _) in found["without handle"].items()}
    asked = ("rank_id", "size", "device_id", "check_async_error")
    assert outcomes == {**dict.fromkeys(asked, "NcclError 4"), "abort": "ok", "destroy": "ok"}
    assert found["handle"] == 0 and found["pickling"] == "TypeError"
    assert all(left_open == 0 for _, left_open in found["without handle"].values())


def test_without_a_gpu_the_constructor_raises(real: Findings) -> None:
    """And it can leave a group open on its thread (seen in NCCL 2.29): construct on a thread of its own."""
    if "constructor" not in real:
        pytest.skip("there is a GPU")
    assert real["constructor"]["failure"] == "NcclError 1"
    assert real["constructor"]["left open"] in (0, 1)
    assert real["constructor"]["ids"] == {"tuple": "TypeError", "short": "ValueError", "text": "TypeError"}

"""Ranks that find each other by environment variables: what is checked, torchrun, torch's own group beside ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from microddp.errors import TransportError
from microddp.rendezvous import store_from_environment
from tests.transport.gloo_pool import QUICK_NAMES

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from microddp.rendezvous import gloo_from_environment, store_from_environment
from microddp.transport.base import Header, Kind, Transfer
from microddp.transport.lifeline import Lifeline

def total(transport):
    header = Header(0, "all_reduce", "ring", "sum", "torch.float32", (1,), -1, 0)
    mine, other = torch.full((1,), 10.0 ** transport.rank), torch.zeros(1)
    opened = transport.open(header, time.monotonic() + 30)
    peer = 1 - transport.rank
    opened.post([Transfer(Kind.SEND, peer, 0, mine), Transfer(Kind.RECV, peer, 0, other)])
    opened.finish()
    return (mine + other).item()

before = sys.argv[1] == "group first"
if before:
    dist.init_process_group("gloo")
first = gloo_from_environment(timeout=30)
second = gloo_from_environment(timeout=30)
kept = Lifeline(*store_from_environment(timeout=30), timeout=30, on_failure=lambda failure: None)
if not before:
    dist.init_process_group("gloo")
values = torch.ones(1)
dist.all_reduce(values)
print(f"rank {first.rank}: {total(first)} {total(second)} {values.item()}\\n", end="", flush=True)
second.close()
dist.destroy_process_group()  # the first transport and the lifeline are never closed
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No rank's variables are set."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") or name.startswith("TORCHELASTIC"):
            monkeypatch.delenv(name)
    return monkeypatch


def run_environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**inherited, **QUICK_NAMES, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def set_variables(environment: pytest.MonkeyPatch, rank: int, world_size: int, port: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        environment.setenv(name, str(value))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, ["RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set", "none of them", "torchrun"]),
        ({"RANK": "0"}, ["WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set", "found RANK=0"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"}, ["MASTER_ADDR must be set"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK='2' must be an integer in 0..1", "WORLD_SIZE=2"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1' must be an integer in 0..1"]),
        ({"RANK": "0", "WORLD_SIZE": "two"}, ["WORLD_SIZE='two' must be an integer from 1 on"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE='0' must be an integer from 1 on"]),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"},
            ["MASTER_PORT='http' must be an integer in 0..65535"],
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "70000"}, ["MASTER_PORT='70000'"]),
    ],
)
def test_bad_variables(environment: pytest.MonkeyPatch, variables: dict[str, str], named: list[str]) -> None:
    complete = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables} if "WORLD_SIZE" in variables else variables
    for name, value in complete.items():
        environment.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        store_from_environment(timeout=1)
    assert all(part in str(raised.value) for part in named), raised.value


def test_port_in_use(environment: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            environment.setenv(name, value)
        with pytest.raises(TransportError, match=rf"rank 0 of 2 cannot listen on 127.0.0.1:{port} .*already in use"):
            store_from_environment(timeout=5)


def test_rank_0_is_not_there(environment: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_variables(environment, 1, 2, port)
    with pytest.raises(TransportError, match=rf"rank 1 of 2 did not reach the store at 127.0.0.1:{port} .*within 1 s"):
        store_from_environment(timeout=1)


def test_each_call_has_its_own_prefix(environment: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_variables(environment, 0, 1, port)
    first, rank, world_size = store_from_environment(timeout=5)
    second, _, _ = store_from_environment(timeout=5)
    first.set("key", "first")
    second.set("key", "second")
    assert (rank, world_size) == (0, 1)
    assert (first.get("key"), second.get("key")) == (b"first", b"second")


def test_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        str(program),
        "last",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *command], env=run_environment(), capture_output=True, text=True, timeout=80
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0: 11.0 11.0 2.0", "rank 1: 11.0 11.0 2.0"]


def test_by_hand_beside_a_process_group(tmp_path: Path) -> None:
    """Rank 0 hosts the store, which torch's own group shares."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), "group first"],
            env=run_environment(RANK=str(rank), **shared),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=80)
            assert process.returncode == 0, errors
            assert output == f"rank {rank}: 11.0 11.0 2.0\n"
            assert "Traceback" not in errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()

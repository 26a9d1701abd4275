"""What ranks do over the stand-in that never get as far as a communicator, or share a device."""

from __future__ import annotations

import os
from typing import Any

from microddp.communicator import Communicator
from tests.nccl.faults_cases import SETUP_S, Seat, strike, values
from tests.nccl.standin_runtime import StandInRuntime


class Unable:
    """CuPy's module on a rank that cannot make the unique id: it dies instead, or never gets there."""

    def __init__(self, seat: Seat, how: str) -> None:
        from cupy.cuda import nccl

        self._nccl, self._seat, self._how = nccl, seat, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nccl, name)

    def get_unique_id(self) -> bytes:
        strike(self._seat, self._how)
        raise AssertionError("stopped and continued")


def never_an_id(seat: Seat, how: str, hosts: bool, timeout: float) -> None:
    """Rank 0 is killed, or stopped, when it should make the communicator's unique id."""
    seat.hosts_store = hosts
    with seat.reporting():
        seat.report("calls")
        seat.transport(api=Unable(seat, how) if seat.rank == 0 else None, timeout=timeout)


def dies_at_the_constructor(seat: Seat, victim: int) -> None:
    """``victim`` is killed as it makes the communicator, for which all others wait."""

    class Dying(Unable):
        def get_unique_id(self) -> bytes:
            made: bytes = self._nccl.get_unique_id()
            return made

        def NcclCommunicator(self, *_: object) -> Any:
            strike(self._seat, "kill")

    with seat.reporting():
        seat.transport(api=Dying(seat, "") if seat.rank == victim else None)


class OnOneDevice(StandInRuntime):
    """All ranks say that they use this device."""

    def identity(self) -> str:
        return "GPU-1"


def shares_a_device(seat: Seat, distinct_hosts: bool) -> None:
    """All ranks use one device; told apart by NCCL_HOSTID, they may."""
    if distinct_hosts:
        os.environ["NCCL_HOSTID"] = f"host {seat.rank}"
    with seat.reporting(), Communicator(seat.transport(runtime=OnOneDevice(blocking=False)), timeout=SETUP_S) as comm:
        tensor = values()
        comm.all_reduce(tensor)
        comm.synchronize()
        assert bool((tensor == seat.world_size).all())

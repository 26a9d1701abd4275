"""Captures and replays that are refused, or fail: whoever captures can go on, and no rank hangs."""

from __future__ import annotations

import pytest
import torch

from microddp.errors import ClosedError, TransportError
from tests.nccl.device_tools import NUMEL, Device, on_devices, total
from tests.nccl.injected_tools import Failing, Recorders, labelled_transfers

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.timeout(60)]


def test_refused_arguments_leave_a_capture_and_the_communicator_usable() -> None:
    def body(device: Device) -> None:
        runtime, comm = device.runtime, device.comm
        x, stream = torch.zeros(NUMEL), runtime.new_stream()
        comm.all_reduce(x, algorithm="ring")
        comm.synchronize()  # x is filled on another stream below
        for call in (lambda: comm.capture_all_reduce(x, "nonsense"), lambda: comm.capture_all_reduce([1.0])):
            with pytest.raises((ValueError, TypeError), match=f"rank {device.rank} of 2"):
                call()

        def enqueue() -> None:
            with pytest.raises(ValueError, match="unknown algorithm"):
                comm.all_reduce(x, algorithm="nonsense")
            comm.all_reduce(x, algorithm="ring")

        graph = runtime.capture(stream, enqueue)
        device.fill(x, device.rank + 1.0, stream)
        graph.launch(stream)
        found = device.look(x, stream)
        device.finish()
        assert found[0].tolist() == total(2)

    on_devices(2, body)


def test_a_failure_within_a_capture_closes_all_ranks_clearly() -> None:
    """Rank 1's first send of the capture fails. The capture ends; no rank hangs."""
    recorders = Recorders(
        3, lambda recorder, rank: Failing(recorder, 0, lambda: KeyError(7)) if rank == 1 else recorder
    )

    def body(device: Device) -> str:
        comm = device.comm
        x = torch.full((NUMEL,), device.rank + 1.0)
        comm.all_reduce(x.clone(), algorithm="ring")
        comm.synchronize()
        device.meet()
        recorders.arm(device.rank)
        device.meet()
        stream = device.runtime.new_stream()
        text = ""
        try:
            graph = device.runtime.capture(stream, lambda: comm.all_reduce(x, algorithm="ring"))
            device.meet()
            comm.all_reduce(x, algorithm="ring")
            comm.synchronize()
            graph.close()
        except (TransportError, ClosedError) as error:
            text = f"{type(error).__name__}: {error}"
            if device.rank == 1:
                device.meet()
        assert not device.runtime.is_capturing(stream)
        with pytest.raises(ClosedError, match="NCCL result 7: an operation is still in progress"):
            comm.all_reduce(x, algorithm="ring")
        assert device.rank != 1 or x.tolist() == [2.0] * NUMEL  # the others' calls after it have failed in flight
        return text

    with labelled_transfers():
        ranks = on_devices(3, body, make_api=recorders.api)
    assert all("NCCL result 7" in text and "rank 1" in text for text in ranks.results), ranks.results
    assert ranks.seconds < 5


def test_who_catches_a_failure_within_a_capture_can_end_it() -> None:
    """Work was captured on the transport's streams before: they have come together again."""
    recorders = Recorders(
        2, lambda recorder, rank: Failing(recorder, 1, lambda: KeyError(7)) if rank == 1 else recorder
    )

    def body(device: Device) -> None:
        comm, runtime = device.comm, device.runtime
        x = torch.full((NUMEL,), 1.0)
        comm.all_reduce(x, algorithm="ring")
        comm.synchronize()
        device.meet()
        if device.rank == 1:
            recorders.arm(1)
            stream = runtime.new_stream()

            def enqueue() -> None:
                with pytest.raises(TransportError, match="NCCL result 7"):
                    comm.all_reduce(x, algorithm="ring")
                assert runtime.is_capturing(stream)

            runtime.capture(stream, enqueue).close()
        device.meet()

    with labelled_transfers():
        on_devices(2, body, make_api=recorders.api)


def test_a_replay_after_a_failure_says_why() -> None:
    def body(device: Device) -> None:
        comm = device.comm
        graph = comm.capture_all_reduce(torch.zeros(NUMEL), algorithm="ring")
        device.meet()
        if device.rank == 1:
            comm._calls.abort(RuntimeError("enough"))
        else:
            with pytest.raises((ClosedError, TransportError), match="rank 1 raised RuntimeError: enough"):
                wait_for_failure(device)
        with pytest.raises((ClosedError, TransportError), match="enough"):
            graph.replay()

    on_devices(2, body)


def wait_for_failure(device: Device) -> None:
    device.comm.all_reduce(torch.zeros(NUMEL), algorithm="ring")
    device.comm.synchronize()


def test_a_call_that_has_not_run_cannot_be_captured() -> None:
    """Ranks may not be connected, nor have agreed on it: a clear error, and everything else goes on."""

    def body(device: Device) -> None:
        stream = device.runtime.new_stream()
        device.comm.all_reduce(torch.zeros(NUMEL), algorithm="ring")
        text = r"all_reduce of float32\[40\] by direct is captured before it has run: call it once, on all ranks"
        with pytest.raises(TransportError, match=f"rank {device.rank} of 2.*{text}"):
            device.runtime.capture(stream, lambda: device.comm.all_reduce(torch.zeros(NUMEL), algorithm="direct"))
        assert not device.runtime.is_capturing(stream)
        x = torch.full((NUMEL,), 1.0)
        device.comm.all_reduce(x, algorithm="ring")
        device.comm.synchronize()
        assert x.tolist() == [2.0] * NUMEL

    on_devices(2, body)


def test_a_graph_needs_a_transport_of_streams() -> None:
    import microddp

    def body(comm: microddp.Communicator) -> None:
        with pytest.raises(ValueError, match="the thread transport has no graphs to capture into"):
            comm.capture_all_reduce(torch.zeros(3))

    microddp.run_threads(body, 2)

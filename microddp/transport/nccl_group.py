"""One NCCL group: its calls are worked out once, since programs enqueue the same groups again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microddp.transport.base import Counters, Kind, Transfer
from microddp.transport.nccl_api import UINT8, describe_nccl_error

__all__ = ["PreparedGroup", "prepare_group"]


class PreparedGroup:
    """The transfers of a group as NCCL takes them: addresses, so whoever keeps it has to keep the tensors too.

    Attributes:
        calls: (is a send, address, bytes, peer) of each transfer.
        step: the schedule's step.
        text: step and peers, for people.
    """

    __slots__ = ("calls", "received", "sent", "step", "text")

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.calls = tuple((each.kind is Kind.SEND, each.view.data_ptr(), each.nbytes, each.peer) for each in transfers)
        self.step = transfers[0].step
        sent = [nbytes for is_send, _, nbytes, _ in self.calls if is_send]
        self.sent = len(sent), sum(sent)
        self.received = len(self.calls) - len(sent), sum(nbytes for _, _, nbytes, _ in self.calls) - sum(sent)
        targets = sorted({peer for is_send, _, _, peer in self.calls if is_send})
        sources = sorted({peer for is_send, _, _, peer in self.calls if not is_send})
        ends = [f"sending to {_ranks(targets)}"] * bool(targets) + [f"receiving from {_ranks(sources)}"] * bool(sources)
        self.text = f"step {self.step}, {' and '.join(ends)}"

    def __len__(self) -> int:
        return len(self.calls)

    def enqueue(self, api: Any, comm: Any, stream: int) -> None:
        """Calls NCCL. A group that was begun is always ended: what the thread calls next would else queue up in it."""
        send, recv = comm.send, comm.recv
        api.groupStart()
        try:
            for is_send, address, nbytes, peer in self.calls:
                (send if is_send else recv)(address, nbytes, UINT8, peer, stream)
        except BaseException:
            try:
                api.groupEnd()  # raises the same once more
            except Exception as again:
                if describe_nccl_error(again) is None:
                    raise
            raise
        api.groupEnd()

    def count(self, counters: Counters) -> None:
        """Adds what the group moves."""
        counters.messages_sent += self.sent[0]
        counters.bytes_sent += self.sent[1]
        counters.messages_received += self.received[0]
        counters.bytes_received += self.received[1]

    def __str__(self) -> str:
        return self.text


def prepare_group(transfers: Sequence[Transfer], rank: int, world_size: int, device: Any) -> PreparedGroup:
    """Checks the transfers of a group.

    Raises:
        ValueError: none; a peer that is no other rank; a receive that combines; memory elsewhere, or not contiguous.
    """
    who = f"rank {rank} of {world_size}"
    if not transfers:
        raise ValueError(f"{who}: a group needs at least one transfer")
    for each in transfers:
        if not 0 <= each.peer < world_size or each.peer == rank:
            raise ValueError(f"{who} cannot exchange data with rank {each.peer}")
        if each.kind is Kind.RECV_COMBINE:
            raise ValueError("the nccl transport cannot combine what it receives: lower the plan without fusing")
        if each.view.device != device or not each.view.is_contiguous():
            raise ValueError(f"{who}: a transfer needs contiguous memory on {device}, not {each.view.device}")
    return PreparedGroup(transfers)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

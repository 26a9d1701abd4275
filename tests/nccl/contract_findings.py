"""What CuPy's NCCL bindings do without a GPU, as data: of the real library in a child process, and of the stand-in.

Usage: python -m tests.nccl.contract_findings, which prints the findings of whatever NCCL CuPy finds, as JSON.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

__all__ = ["find"]

MEMORY = 4096  # an address that nothing looks at, as every call that names it is refused first
NO_COMMUNICATOR_CALLS = ("rank_id", "size", "device_id", "check_async_error", "abort", "destroy")


def outcome(call: Callable[[], object]) -> str:
    """ "ok", or the type of what was raised, with NCCL's status."""
    try:
        call()
    except Exception as error:
        status = getattr(error, "status", None)
        return type(error).__name__ + ("" if status is None else f" {status}")
    return "ok"


def on_a_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns on a thread of its own: whatever group it leaves open ends with the thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def _unconnected(api: Any) -> Any:
    """A communicator without a handle, as it is after ``abort``: NCCL refuses what names it."""
    return api.NcclCommunicator.__new__(api.NcclCommunicator)


def _send(api: Any, *changes: tuple[int, object]) -> Callable[[], object]:
    arguments: list[object] = [MEMORY, 4, api.NCCL_UINT8, 0, 0]
    for index, value in changes:
        arguments[index] = value
    return lambda: _unconnected(api).send(*arguments)


def _groups(api: Any) -> dict[str, list[str]]:
    start, end, bad = api.groupStart, api.groupEnd, _send(api)
    sequences: dict[str, list[Callable[[], object]]] = {
        "balanced": [start, end, end],
        "nested": [start, start, end, end, end],
        "bad call": [start, bad, end, end],
        "bad call, nested": [start, start, bad, end, end, end],
        "bad call outside a group": [bad, end],
        "other thread": [start, lambda: on_a_thread(lambda: _raise(api, end)), end],
    }
    return {name: on_a_thread(partial(_outcomes, each)) for name, each in sequences.items()}


def _outcomes(calls: Sequence[Callable[[], object]]) -> list[str]:
    return [outcome(call) for call in calls]


def _raise(api: Any, call: Callable[[], object]) -> None:
    """Stands in the sequence for an end that another thread tried: ok only if that was refused."""
    if outcome(call) != "NcclError 5":
        raise AssertionError("another thread ended the group")


def _conversions(api: Any) -> dict[str, str]:
    kinds: dict[str, tuple[tuple[int, object], ...]] = {
        "integers": (),
        "stream None": ((4, None),),
        "memory None": ((0, None),),
        "memory a float": ((0, 4096.0),),
        "count a float": ((1, 4.0),),
        "count negative": ((1, -1),),
        "type a text": ((2, "uint8"),),
        "peer beyond 32 bits": ((3, 1 << 40),),
    }
    return {name: on_a_thread(partial(outcome, _send(api, *each))) for name, each in kinds.items()}


def _constructor(api: Any) -> dict[str, Any]:
    """Constructing without a GPU, and how many groups the failure leaves open on its thread."""
    unique_id = api.get_unique_id()

    def attempt() -> tuple[str, int]:
        failure = outcome(lambda: api.NcclCommunicator(1, unique_id, 0))
        return failure, _open_groups(api)

    failure, left_open = on_a_thread(attempt)
    wrong = {"tuple": tuple(unique_id), "short": unique_id[:5], "text": "x" * 128}
    return {
        "failure": failure,
        "left open": left_open,
        "ids": {name: outcome(partial(api.NcclCommunicator, 1, each, 0)) for name, each in wrong.items()},
    }


def _open_groups(api: Any) -> int:
    count = 0
    while outcome(api.groupEnd) != "NcclError 5":
        count += 1
    return count


def _without_handle(api: Any) -> dict[str, list[Any]]:
    """By call: what comes of it on a communicator that has no handle (any more), and the groups that it leaves open."""

    def ask(name: str) -> list[Any]:
        return [outcome(getattr(_unconnected(api), name)), _open_groups(api)]

    return {name: on_a_thread(partial(ask, name)) for name in NO_COMMUNICATOR_CALLS}


def find(api: Any) -> dict[str, Any]:
    """All findings about the module ``cupy.cuda.nccl``. Makes a communicator only where there is no GPU to make it."""
    ids = [api.get_unique_id() for _ in range(3)]
    error = api.NcclError(5)
    copy = pickle.loads(pickle.dumps(error))
    return {
        "version": api.get_version(),
        "build version": api.get_build_version(),
        "ids": [[type(each).__name__, len(each)] for each in ids],
        "distinct ids": len(set(ids)),
        "uint8": api.NCCL_UINT8,
        "statuses": [outcome(partial(api.check_status, status)) for status in range(9)],
        "error": [type(error).__name__, isinstance(error, RuntimeError), error.status, str(error), copy.status],
        "config": sorted(name for name in dir(api.NcclConfig()) if not name.startswith("_")),
        "groups": _groups(api),
        "conversions": _conversions(api),
        "without handle": _without_handle(api),
        "handle": _unconnected(api).comm,
        "pickling": outcome(lambda: pickle.dumps(_unconnected(api))),
    }


def main() -> None:
    import torch
    from cupy.cuda import nccl

    if not nccl.available:
        print(json.dumps(None))
        return
    findings = find(nccl)
    findings["cuda initialised"] = torch.cuda.is_initialized()
    if not torch.cuda.is_available():
        findings["constructor"] = _constructor(nccl)
    print(json.dumps(findings))


if __name__ == "__main__":
    main()

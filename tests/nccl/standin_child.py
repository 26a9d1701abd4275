"""A rank in a process of its own, to be killed: joins three cliques, says so, then never comes to what is sent to it.

Usage: python -m tests.nccl.standin_child ID ID ID, the cliques' ids in hexadecimal.
"""

from __future__ import annotations

import ctypes
import sys

from tests.nccl.build import load_standin


def main(ids: list[str]) -> None:
    load_standin()
    from cupy.cuda import nccl

    memory = ctypes.create_string_buffer(4)
    communicators = [nccl.NcclCommunicator(2, bytes.fromhex(each), 1) for each in ids]
    for communicator in communicators:
        communicator.recv(ctypes.addressof(memory), 4, nccl.NCCL_UINT8, 0, 0)
        if memory.raw != b"ping":
            raise SystemExit(f"received {memory.raw!r}")
    print("ready", flush=True)
    sys.stdin.read()  # until it is killed


if __name__ == "__main__":
    main(sys.argv[1:])

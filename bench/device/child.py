"""One process of the device check: imports what it is to run, waits for the word, runs it, and reports.

``python -m bench.device.child MODULE:FUNCTION --records FILE``; then a line of JSON on the standard input.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.device.records import Context, NoDeviceError

__all__ = ["main"]

Function = Callable[[Context], Any]


def main() -> int:
    """Runs the function; returns the exit status."""
    faulthandler.enable()
    args = _parser().parse_args()
    context = Context(args.records, args.records.parent, args.stand_in)
    try:
        function = _load(args.function)
        if args.needs_device and not args.stand_in:
            _require_device()
        if args.prepare:
            context.prepared = _load(args.prepare)(context)
        context.write("ready")
        order = _read_order()
        if order is None:
            return 0
        context.deadline, context.options = time.monotonic() + order["seconds"], order["options"]
        threading.Thread(target=_end_with_parent, daemon=True).start()
        function(context)
        context.write("end")
    except NoDeviceError as error:
        context.write("no_device", text=str(error))
    except BaseException as error:
        context.error(error)
        sys.stderr.flush()
        os._exit(1)  # what is left half done could keep the interpreter from ending
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--prepare", default="")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--needs-device", action="store_true")
    return parser


def _load(name: str) -> Function:
    module, _, attribute = name.partition(":")
    found: Function = getattr(importlib.import_module(module), attribute)
    return found


def _require_device() -> None:
    import torch

    if not torch.cuda.is_available():
        raise NoDeviceError(f"torch {torch.__version__} sees no GPU")


def _read_order() -> dict[str, Any] | None:
    """The line, read past Python's buffer, whose lock must be free when the interpreter ends."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            return None
        line += more
    order: dict[str, Any] = json.loads(line)
    return order


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

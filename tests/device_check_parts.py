"""Parts of a device check that end in every way there is. Light to import, as each runs in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from bench.device.parts import Part
from bench.device.records import Context

HANG_S = 600.0


def good(context: Context) -> None:
    context.check("a fact", True)
    context.figure("a measurement", 1.5, "us")
    context.summary("all is well")


def exits(context: Context) -> None:
    context.step("the third of five")
    os._exit(3)


def silent(context: Context) -> None:
    os._exit(0)


def killed(context: Context) -> None:
    context.check("something before", True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(context: Context) -> None:
    context.step("waiting for nothing")
    threading.Event().wait(HANG_S)


def hangs_at_exit(context: Context) -> None:
    threading.Thread(target=threading.Event().wait, args=(HANG_S,)).start()


def raises(context: Context) -> None:
    context.step("dividing")
    raise ZeroDivisionError("by nothing")


def wrong(context: Context) -> None:
    context.check("first", True)
    context.check("second", False, "3 instead of 4")


def leaves_a_process(context: Context) -> None:
    context.note("pid", subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_S})"]).pid)


def prepared(context: Context) -> str:
    return "made before"


def uses_what_was_prepared(context: Context) -> None:
    context.check("prepared", context.prepared == "made before")


def _part(name: str, prepare: str = "", weight: float = 4.0, stands_in: bool = True) -> Part:
    module = "tests.device_check_parts:"
    return Part(name, f"{module}{name}", weight, "", f"{module}{prepare}" if prepare else "", False, stands_in)


PARTS = (
    _part("good"),
    _part("exits"),
    _part("silent"),
    _part("killed"),
    _part("hangs", weight=1),
    _part("raises"),
    _part("wrong"),
    _part("leaves_a_process"),
    Part("without_device", "tests.device_check_parts:good", 4, ""),
    _part("uses_what_was_prepared", "prepared"),
    Part("missing", "tests.device_check_parts:missing", 4, "", needs_device=False),
    _part("hangs_at_exit", weight=1),
)
SKIPPED = (_part("hangs", stands_in=False), _part("good"))

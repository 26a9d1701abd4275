"""What the commands have in common on their way in: bad usage as one clear line, and values read from text."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["UsageError", "integer", "load_algorithms", "parse_nbytes", "parse_sizes", "usage_errors"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_SIZES = 64


class UsageError(Exception):
    """The command was called wrongly: its text is all that the user needs to see."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns the library's complaints about arguments into bad usage."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A type for argparse: an int from ``minimum`` to ``maximum``, both included."""
    wanted = f"an integer from {minimum} on" if maximum is None else f"an integer from {minimum} to {maximum}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return read


def parse_nbytes(text: str) -> int:
    """Bytes from ``4096``, ``4K``, ``64M`` or ``1G`` (powers of 1024).

    Raises:
        UsageError: it is none of these.
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"--sizes: {text.strip()!r} is not a number of bytes such as 4096, 4K, 64M or 1G")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_sizes(text: str) -> list[int]:
    """Sizes in bytes from a list ``4K,1M`` or a range ``4K:64M:x4`` (times 4) or ``1M:4M:+1M`` (plus 1M).

    Raises:
        UsageError: what is wrong with it.
    """
    if ":" not in text:
        return [parse_nbytes(each) for each in text.split(",")]
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise UsageError(f"--sizes: {text!r} is not FIRST:LAST:xFACTOR, FIRST:LAST:+BYTES or a list with commas")
    first, last, step = parse_nbytes(parts[0]), parse_nbytes(parts[1]), (parts[2] if len(parts) == 3 else "x2")
    if last < first:
        raise UsageError(f"--sizes: the range {text!r} ends below its start")
    if re.fullmatch(r"[x*]\d+", step) and int(step[1:]) > 1 and first > 0:
        factor, increment = int(step[1:]), 0
    elif step[:1] == "+" and parse_nbytes(step[1:]) > 0:
        factor, increment = 1, parse_nbytes(step[1:])
    else:
        raise UsageError(f"--sizes: the step {step!r} of {text!r} must be xFACTOR (2 or more) or +BYTES, and move on")
    sizes = [first]
    while (following := sizes[-1] * factor + increment) <= last:
        sizes.append(following)
        if len(sizes) > _MAX_SIZES:
            raise UsageError(f"--sizes: {text!r} has more than {_MAX_SIZES} sizes")
    return sizes


def load_algorithms(source: str | None) -> None:
    """Imports the module, or runs the file, that registers the user's algorithms; once in a process.

    Raises:
        UsageError: it cannot be found, or fails.
    """
    if source is None:
        return
    try:
        if source.endswith(".py"):
            _run_file(Path(source))
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            importlib.import_module(source)
    except Exception as error:  # whatever the user's own code raises
        raise UsageError(f"--load {source}: {type(error).__name__}: {error}") from error


def _run_file(path: Path) -> None:
    name = f"microddp_loaded:{path.resolve()}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise

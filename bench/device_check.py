"""Checks microddp on one GPU: ``python bench/device_check.py``, with the repository on PYTHONPATH.

It takes at most ``--seconds`` (150). Every part runs in a process of its own, for its share of the time, and fails on
its own. A short table is printed last; everything goes to a JSON file. Where there is no GPU, ``--stand-in`` runs what
needs none. Written for Python 3.12, torch 2.11 (CUDA 13), Triton 3.6 and cupy-cuda13x 14.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.device.parts import PARTS, Part
from bench.device.runner import Result, run_parts
from bench.device.table import as_json, table_of

__all__ = ["main"]

_GOOD = ("ok", "no device")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check; returns 0 if all was well, else 1. Without a device that is well only with ``--stand-in``."""
    args = _parser().parse_args(argv)
    started = time.monotonic()
    parts = _chosen(args.parts, _registered(args.registry))
    with tempfile.TemporaryDirectory(prefix="microddp-device-check-", ignore_cleanup_errors=True) as folder:
        results = run_parts(parts, args.seconds, Path(folder), stand_in=args.stand_in, report=_report)
    total_s = time.monotonic() - started
    args.json.write_text(json.dumps(as_json(results, args.stand_in, total_s), indent=1) + "\n")
    print(f"everything: {args.json}", file=sys.stderr, flush=True)
    print(table_of(results, args.stand_in, total_s), flush=True)
    good = _GOOD if args.stand_in else _GOOD[:1]
    return 0 if all(each.outcome.status in good for each in results) else 1


def _parser() -> argparse.ArgumentParser:
    titles = "\n".join(f"  {part.name:<14} {part.title}" for part in PARTS)
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"parts:\n{titles}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="the time for all of it (150)")
    parser.add_argument("--json", type=Path, default=Path("device_check.json"), help="a file (device_check.json)")
    parser.add_argument("--parts", default="", metavar="NAMES", help="some of them, separated by commas (all)")
    parser.add_argument("--stand-in", action="store_true", help="run what needs no device; no figures")
    parser.add_argument("--registry", default="", help=argparse.SUPPRESS)  # module:ATTRIBUTE, other parts, for tests
    return parser


def _registered(registry: str) -> Sequence[Part]:
    if not registry:
        return PARTS
    module, _, attribute = registry.partition(":")
    found: Sequence[Part] = getattr(importlib.import_module(module), attribute)
    return found


def _chosen(names: str, parts: Sequence[Part]) -> list[Part]:
    if not names:
        return list(parts)
    by_name = {part.name: part for part in parts}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise SystemExit(f"device_check: unknown part {unknown[0]!r}; known: {', '.join(by_name)}")
    return [part for part in parts if part.name in wanted]


def _report(result: Result) -> None:
    outcome = result.outcome
    print(f"{result.part.name}: {outcome.status} {outcome.detail}".rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""The command line."""

from __future__ import annotations

from microddp.cli.main import main

__all__ = ["main"]

"""What evaluation raises."""

from __future__ import annotations

__all__ = ["NotEvaluable"]


class NotEvaluable(Exception):
    """The body of a Triton function uses something that has no torch form here; the text says what."""

"""What evaluation raises."""

from __future__ import annotations

__all__ = ["ConditionOnTensor", "NotEvaluable"]


class NotEvaluable(Exception):
    """The body of a Triton function uses something that has no torch form here; the text says what."""


class ConditionOnTensor(NotEvaluable):
    """Python decides by the elements of a tensor, which Triton does not compile either."""

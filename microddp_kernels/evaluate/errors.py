"""What evaluation raises."""

from __future__ import annotations

__all__ = ["ConditionOnTensor", "NotEvaluable"]


class NotEvaluable(Exception):
    """The body of a Triton function uses something that has no torch form here; the text says what."""


class ConditionOnTensor(TypeError):
    """The body decides by the elements of a tensor as if they were one: it is wrong, not merely not evaluable.

    The interpreter must not be asked instead: it takes every tensor for true.
    """

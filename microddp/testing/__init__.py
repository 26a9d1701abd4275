"""For the test suites of users: ``check_operator`` tests what an operator declares."""

from __future__ import annotations

from microddp.testing.check import check_operator
from microddp.testing.report import CheckRecord, OperatorError, OperatorReport

__all__ = ["CheckRecord", "OperatorError", "OperatorReport", "check_operator"]

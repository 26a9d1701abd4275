"""The short table at the end of the device check."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

from bench.device.records import checks_of
from bench.device.runner import Result

__all__ = ["as_json", "table_of"]

WIDTH: Final = 98
_MAX_LINES: Final = 38
_NAME, _STATUS, _SECONDS = 14, 10, 5
_TEXT: Final = WIDTH - _NAME - _STATUS - _SECONDS - 3


def table_of(results: Sequence[Result], stand_in: bool, total_s: float) -> str:
    """The table: under 40 lines, under 100 columns. What does not fit is in the JSON."""
    head = f"device check, {total_s:.0f} s"
    head += ": STAND-IN, no device; nothing here is a figure of a GPU" if stand_in else ""
    rule = "-" * WIDTH
    lines = [head, f"{'part':<{_NAME}} {'result':<{_STATUS}} {'s':>{_SECONDS}} what was seen", rule]
    room = _MAX_LINES - len(lines) - 1
    texts = [_texts(each) for each in results]
    limit = next((each for each in range(9, 0, -1) if sum(min(len(text), each) for text in texts) <= room), 1)
    for result, text in zip(results, texts):
        shown = text[:limit]
        if len(text) > limit:
            shown[-1] = shown[-1][: _TEXT - 8] + " … (JSON)"
        for number, line in enumerate(shown):
            name, status, seconds = (
                (result.part.name, result.outcome.status, f"{result.seconds:.1f}") if not number else ("", "", "")
            )
            lines.append(f"{name:<{_NAME}.{_NAME}} {status:<{_STATUS}} {seconds:>{_SECONDS}} {line}".rstrip())
    return "\n".join([*lines, rule])


def _texts(result: Result) -> list[str]:
    outcome = result.outcome
    checks = checks_of(outcome.records)
    texts = [outcome.detail] if outcome.detail else []
    if checks and outcome.status != "FAILED":
        texts.append(f"{sum(each['ok'] for each in checks)} of {len(checks)} checks right")
    texts += [each["text"] for each in outcome.of("summary")]
    lines = [line for text in texts for line in textwrap.wrap(" ".join(text.split()), _TEXT)]
    return lines or [""]


def as_json(results: Sequence[Result], stand_in: bool, total_s: float) -> dict[str, Any]:
    """Everything, as plain data."""
    parts = [
        {
            "part": each.part.name,
            "status": each.outcome.status,
            "detail": each.outcome.detail,
            "seconds": each.seconds,
            "records": list(each.outcome.records),
            "errors": each.outcome.errors,
        }
        for each in results
    ]
    return {"stand_in": stand_in, "seconds": total_s, "parts": parts}

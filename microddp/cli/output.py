"""How the commands write: text, tables and progress, with colour only where a person looks at a terminal.

Nothing is cut off: what is wider than the terminal wraps there. Written to a file or a pipe it is plain text, and
characters that the stream cannot encode become ASCII.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

__all__ = ["Column", "Output", "Progress", "ascii_text", "counted"]

_ASCII = str.maketrans({"×": "x", "−": "-", "–": "-", "─": "-", "∘": "*", "…": "...", "·": ".", "→": "->"})
_MAX_TEXT_WIDTH = 100
_UNLIMITED = 10_000
QUIET_S = 2.0
"""What takes no longer than this shows no progress."""


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 processes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def ascii_text(text: str, encoding: str) -> str:
    """``text`` as it is if ``encoding`` has all its characters, else in ASCII."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        header: may have several lines.
        align: "left" or "right".
    """

    header: str
    align: Literal["left", "right"] = "left"


class Output:
    """Writes to one stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream: TextIO = sys.stdout if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self.width = shutil.get_terminal_size((120, 24)).columns

    def line(self, text: str = "", style: str = "") -> None:
        """One line, however long."""
        self._write(self._render(text, style) if text else "\n")

    def paragraph(self, text: str, style: str = "", indent: str = "") -> None:
        """Text that wraps at the width, with a hanging indent."""
        width = min(self.width, _MAX_TEXT_WIDTH)
        for each in textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False) or [""]:
            self.line(each, style)

    def heading(self, text: str) -> None:
        """The heading of a section, with an empty line before it."""
        self.line()
        self.line(text, "bold")

    def table(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[str]],
        separate: Iterable[int] = (),
        *,
        may_close_up: bool = False,
    ) -> None:
        """A table. Cells that say OK or yes, MISMATCH or NO, are coloured on a terminal.

        Args:
            columns: what stands where.
            rows: the cells, as text.
            separate: the indices of the rows after which an empty line follows.
            may_close_up: the columns stand one space apart instead of two where the table would be too wide otherwise.
        """
        rows, gaps = list(rows), set(separate)
        text = self._render(_table(columns, rows, gaps, padding=1), "")
        if may_close_up and _text_width(text) > self.width:
            text = self._render(_table(columns, rows, gaps, padding=0), "")
        self._write(text)

    def pairs(self, rows: Iterable[Sequence[str]], wrap_at: int) -> None:
        """Names and what is to be said of each, in two columns; the second wraps."""
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in rows:
            table.add_row(name, "\n".join(textwrap.wrap(value, wrap_at, break_long_words=False)))
        self._write(self._render(table, ""))

    def json(self, value: Any) -> None:
        """One JSON document."""
        self._write(json.dumps(value, indent=2, allow_nan=False) + "\n")

    def _render(self, what: Any, style: str) -> str:
        if isinstance(what, str) and not (self.is_terminal and style):
            return what + "\n"
        from rich.console import Console

        buffer = io.StringIO()
        console = Console(
            file=buffer, width=_UNLIMITED, force_terminal=self.is_terminal, highlight=False, markup=False, emoji=False
        )
        console.print(what, style=style or None, soft_wrap=isinstance(what, str))
        return "".join(f"{each.rstrip()}\n" for each in buffer.getvalue().splitlines())

    def _write(self, text: str) -> None:
        self.stream.write(ascii_text(text, self.stream.encoding or "utf-8"))
        self.stream.flush()


def _table(columns: Sequence[Column], rows: Iterable[Sequence[str]], gaps: set[int], padding: int) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, padding, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.header, justify=column.align, no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        if number in gaps:
            table.add_row(*("" for _ in row))
    return table


def _text_width(text: str) -> int:
    """Of the longest line, without the colours."""
    return max((len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()), default=0)


def _style(cell: str) -> str:
    if cell in ("OK", "yes"):
        return "green"
    return "bold red" if cell in ("MISMATCH", "NO") else ""


class Progress:
    """What a long command is doing, on the error stream: a bar on a terminal, else a line now and then.

    Silent for the first two seconds, and for ever with ``enabled=False``.
    """

    def __init__(self, title: str, total: int, *, enabled: bool = True, interval_s: float = 5.0) -> None:
        self.title, self.total, self.enabled, self.interval_s = title, total, enabled, interval_s
        self._done = 0
        self._next = time.monotonic() + QUIET_S
        self._bar: Any = None
        self._task: Any = None

    def step(self, what: str) -> None:
        """Begins the next of ``total`` parts."""
        now = time.monotonic()
        if self.enabled and now >= self._next:
            self._show(what, now)
        self._done += 1

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, what: str, now: float) -> None:
        if not sys.stderr.isatty():
            self._next = now + self.interval_s
            text = f"{self.title}: {self._done} of {self.total} done, now {what}\n"
            sys.stderr.write(ascii_text(text, sys.stderr.encoding or "utf-8"))
            sys.stderr.flush()
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total)
        self._bar.update(self._task, completed=self._done, description=f"{self.title}: {what}")

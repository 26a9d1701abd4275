"""What the documentation shows is what happens: its commands and programs run, and print what is shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.documentation import ROOT, SHELL_LANGUAGES, Block, Command, find_blocks, find_commands, missing_line, run

pytestmark = pytest.mark.docs

TIMEOUT_S = 200
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block
    for path in DOCUMENTS
    if path.exists()
    for block in find_blocks(str(path.relative_to(ROOT)), path.read_text("utf-8"))
]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL_LANGUAGES and block.reason_not_run is None]
COMMANDS = [(block, command) for block in SHELL_BLOCKS for command in find_commands(block)]
PROGRAMS = [block for block in BLOCKS if block.language == "python" and block.reason_not_run is None]

MARKDOWN = """
Text.
<!-- output varies -->

```console
$ echo one; \\
    echo 2
one
3
$ true
```
<!-- not run: needs a GPU -->
```bash
$ false
```
<!-- not run: does not belong to the block, text is between -->
text
```python
print("hello")
```
"""


def _place(block: Block) -> str:
    return f"{block.document}:{block.line}"


def _label(part: Block | Command) -> str:
    return _place(part) if isinstance(part, Block) else part.text


def test_the_readme_exists_and_shows_commands() -> None:
    assert (ROOT / "README.md").exists(), "there is no README.md"
    assert any(block.document == "README.md" for block in SHELL_BLOCKS), "README.md shows no command that is run here"


@pytest.mark.parametrize("block", BLOCKS, ids=_place)
def test_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.reason_not_run != "", "`not run` gives no reason"
    if block.language in SHELL_LANGUAGES and block.reason_not_run is None:
        assert find_commands(block), "no line starts with `$ `, so that nothing of this block would be run"


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=_label)
def test_command_prints_what_is_shown(block: Block, command: Command) -> None:
    result = run(["bash", "-c", command.text], ROOT, TIMEOUT_S)
    assert result.status == 0, f"{_place(block)}: {command.text}\nstatus {result.status}\n{result.output}"
    missing = missing_line(command.shown, result.output, block.output_varies)
    assert missing is None, f"{_place(block)}: {command.text}\nprints no line {missing!r} there:\n{result.output}"


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("block", PROGRAMS, ids=_place)
def test_program_runs(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join(block.lines) + "\n", "utf-8")
    result = run([sys.executable, str(program)], tmp_path, TIMEOUT_S)
    assert result.status == 0, f"{_place(block)}\nstatus {result.status}\n{result.output}"


def test_blocks_and_commands_are_found() -> None:
    shell, not_run, program = find_blocks("x.md", MARKDOWN)
    assert [_place(block) for block in (shell, not_run, program)] == ["x.md:5", "x.md:13", "x.md:18"]
    assert [(command.text, command.shown) for command in find_commands(shell)] == [
        ("echo one; echo 2", ("one", "3")),
        ("true", ()),
    ]
    assert (shell.output_varies, not_run.output_varies, program.output_varies) == (True, False, False)
    assert (shell.reason_not_run, not_run.reason_not_run, program.reason_not_run) == (None, "needs a GPU", None)
    assert program.lines == ('print("hello")',)


@pytest.mark.parametrize(
    ("shown", "varies", "missing"),
    [
        (("one", "took 2.5 s  ──"), False, None),
        (("one", "...", "last"), False, None),
        (("last", "one"), False, "one"),  # the order counts
        (("one", "one"), False, "one"),  # each line counts once
        (("took 3.5 s  ──",), False, "took 3.5 s  ──"),
        (("took 31e-3 s ─────",), True, None),
        (("took x s ──",), True, "took x s ──"),
    ],
)
def test_shown_lines_are_looked_for_in_order(shown: tuple[str, ...], varies: bool, missing: str | None) -> None:
    assert missing_line(shown, "one\ntook 2.5 s  ──\nlast\n", varies) == missing


def test_a_failing_command_and_one_that_hangs_are_told(tmp_path: Path) -> None:
    failed = run(["bash", "-c", "echo why >&2; exit 3"], tmp_path, 10)
    assert (failed.status, failed.output) == (3, "why\n")
    started = time.monotonic()
    hangs = run(["bash", "-c", "echo before; sleep 60 & wait"], tmp_path, 0.5)
    assert (hangs.status, hangs.output) == (None, "before\n")
    assert time.monotonic() - started < 30

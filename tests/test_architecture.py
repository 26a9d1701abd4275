"""The arrows of the design hold: who may import whom, how long files and functions are, what an import costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import architecture
from tests.architecture import MAX_FILE_LINES, MAX_FUNCTION_LINES, RULES, Module, file_is_short, find_cycle

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("microddp", "microddp_kernels")
NOT_LOADED_BY_IMPORT = ("cupy", "triton", "sklearn", "rich")


def _load_packages() -> list[Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    known = frozenset(names.values())
    return [Module(names[path], path.read_text("utf-8"), known, path.name == "__init__.py") for path in paths]


MODULES = _load_packages()
OTHER_SOURCES = sorted(path for folder in ("bench", "tests") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_module_keeps_the_rules(module: Module) -> None:
    violations = [f"{rule.__name__}: {text}" for rule in RULES for text in rule(module)]
    assert not violations, "\n".join([module.name, *violations])


@pytest.mark.parametrize("path", OTHER_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_other_source_is_short(path: Path) -> None:
    assert not list(file_is_short(Module(path.stem, path.read_text("utf-8"), frozenset())))


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle(MODULES) == []


def test_importing_microddp_loads_no_optional_framework_and_touches_no_gpu() -> None:
    code = "import json, sys, microddp, torch; print(json.dumps([sorted(sys.modules), torch.cuda.is_initialized()]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded, cuda_is_initialized = json.loads(done.stdout)
    assert "microddp" in loaded
    assert [name for name in NOT_LOADED_BY_IMPORT if name in loaded] == []
    assert cuda_is_initialized is False


def _function(num_lines: int, docstring: str = "") -> str:
    """A function of ``num_lines`` lines, beside its docstring."""
    body = f"    '''{docstring}'''\n" if docstring else ""
    return "def long_one():\n" + body + "    x = 1\n" * (num_lines - 1)


# Rule, module, a source that breaks it, a source that keeps it.
CASES = [
    (
        "kernels_know_no_ranks",
        "microddp_kernels.x",
        "def f():\n    import microddp.errors",
        "import microddp_kernels.y",
    ),
    ("schedule_is_pure", "microddp.schedule.x", "import torch", "import heapq, microddp.schedule.ring"),
    ("schedule_is_pure", "microddp.schedule.x", "from microddp import plan", "from microddp import errors"),
    ("schedule_is_pure", "microddp.schedule.x", "from microddp import init", "from microddp.errors import Any"),
    (
        "schedule_is_pure",
        "microddp.schedule",
        "from ..transport import base",
        "from .ring import f\nfrom . import ring",
    ),
    ("plan_is_pure", "microddp.plan.x", "def f():\n    import numpy", "from microddp.schedule.ring import f"),
    ("plan_is_pure", "microddp.plan", "import microddp.engine", "import microddp.plan.x"),
    ("movers_know_no_schedules", "microddp.transport.gloo", "import microddp.plan", "import torch, microddp.errors"),
    ("movers_know_no_schedules", "microddp_kernels.launchers.x", "import microddp.schedule.ring", "import torch"),
    ("engine_names_no_algorithm", "microddp.engine", "x = {'ring': 1}", "x = 'string'"),
    ("engine_names_no_algorithm", "microddp.engine.x", "import microddp.schedule.ring", "import microddp.schedule.ir"),
    ("cli_is_imported_by_main_only", "microddp.api", "from microddp import cli", "import microddp.client"),
    ("cli_is_imported_by_main_only", "microddp", "def f():\n    import microddp.cli.demo", "import microddp.api"),
    ("imports_go_down_the_layers", "microddp.engine", "import microddp.communicator", "import microddp.plan.x"),
    ("imports_go_down_the_layers", "microddp.communicator", "from microddp import api", "import microddp.engine"),
    ("functions_are_short", "microddp.x", _function(MAX_FUNCTION_LINES + 1), _function(MAX_FUNCTION_LINES)),
    ("functions_are_short", "microddp.x", f"async {_function(MAX_FUNCTION_LINES + 1)}", _function(59, "d\n" * 30)),
    ("public_names_are_sorted", "microddp.x", "__all__ = ['b', 'a']", "__all__ = ['Z9', 'A', 'Op2', 'Op10', 'a', 'b']"),
    ("file_is_short", "microddp.x", "\n" * (MAX_FILE_LINES + 1), "\n" * MAX_FILE_LINES),
]
KNOWN = frozenset(
    f"microddp.{name}" for name in ("api", "cli", "errors", "plan", "schedule", "schedule.ring", "transport")
)


@pytest.mark.parametrize(("rule", "name", "breaks", "keeps"), CASES)
def test_rule_can_fail(rule: str, name: str, breaks: str, keeps: str) -> None:
    is_package = name in ("microddp", "microddp.schedule", "microddp.plan")
    check = getattr(architecture, rule)
    assert list(check(Module(name, breaks, KNOWN, is_package)))
    assert not list(check(Module(name, keeps, KNOWN, is_package)))


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, *_ in CASES}


def test_a_circle_of_imports_is_found_unless_an_import_is_deferred() -> None:
    known = frozenset({"p.a", "p.b", "p.c"})
    chain = [Module("p.a", "from p import b", known), Module("p.b", "import p.c", known)]
    deferred = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a\ndef f():\n    import p.a"
    assert find_cycle([*chain, Module("p.c", "try:\n    import p.a\nfinally:\n    pass", known)]) == [
        *("p.a", "p.b", "p.c"),
        "p.a",
    ]
    assert find_cycle([*chain, Module("p.c", deferred, known)]) == []


def test_the_modules_of_both_packages_are_found() -> None:
    names = {module.name for module in MODULES}
    assert {"microddp", "microddp.errors", "microddp.schedule.ir", "microddp_kernels.launchers.base"} <= names

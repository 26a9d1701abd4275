"""The rules of the design: arrows and sizes. Each is a function of a module that yields a text for each violation."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60  # from def to the last line, without the docstring

# An import goes from right to left only; one group of names is one layer. Other modules may import from any layer.
LAYERS = (
    ("errors",),
    ("schedule",),
    ("plan",),
    ("views",),
    ("engine", "stream_engine"),
    ("communicator", "lifecycle", "calls", "collectives", "planner", "stream_work"),
    ("api",),
    ("ddp", "torch_backend", "cli"),
    ("__main__",),
)
ALGORITHMS = frozenset(
    {"naive", "tree", "ring", "full_ring", "direct", "recursive_doubling", "halving_doubling", "double_tree"}
    | {"double_binary_tree", "rabenseifner", "hierarchical"}
)


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name. Deferred: inside a function, or for the type checker only."""

    name: str
    line: int
    deferred: bool


@dataclass(frozen=True)
class Module:
    """A module's name and source, and the names of all modules of the project (to tell modules from attributes)."""

    name: str
    source: str
    known: frozenset[str]
    is_package: bool = False

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @functools.cached_property
    def imports(self) -> list[Import]:
        found = _walk_imports(self.tree, deferred=False)
        return [Import(name, node.lineno, deferred) for node, deferred in found for name in self._targets(node)]

    def _targets(self, node: ast.Import | ast.ImportFrom) -> set[str]:
        if isinstance(node, ast.Import):
            return {alias.name for alias in node.names}
        base = node.module or ""
        if node.level:
            parents = self.name.split(".")
            kept = parents[: len(parents) - node.level + self.is_package]
            base = ".".join([*kept, base] if base else kept)
        full = {f"{base}.{alias.name}" for alias in node.names}
        modules = full & self.known
        return modules if modules == full else modules | {base}


def _walk_imports(node: ast.AST, deferred: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, deferred
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _walk_imports(child, deferred or inside or checking)


def _within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _imports_only(module: Module, *allowed: str) -> Iterator[str]:
    for each in module.imports:
        if each.name.split(".")[0] not in sys.stdlib_module_names and not _within(each.name, *allowed):
            yield f"line {each.line}: imports {each.name}; only {', '.join(('the standard library', *allowed))} may be"


def _imports_none_of(module: Module, *forbidden: str) -> Iterator[str]:
    for each in module.imports:
        if _within(each.name, *forbidden):
            yield f"line {each.line}: imports {each.name}"


def kernels_know_no_ranks(module: Module) -> Iterator[str]:
    if _within(module.name, "microddp_kernels"):
        yield from _imports_none_of(module, "microddp")


def schedule_is_pure(module: Module) -> Iterator[str]:
    if _within(module.name, "microddp.schedule"):
        yield from _imports_only(module, "microddp.errors", "microddp.schedule")


def plan_is_pure(module: Module) -> Iterator[str]:
    if _within(module.name, "microddp.plan"):
        yield from _imports_only(module, "microddp.errors", "microddp.schedule", "microddp.plan")


def movers_know_no_schedules(module: Module) -> Iterator[str]:
    if _within(module.name, "microddp.transport", "microddp_kernels.launchers"):
        names = ("schedule", "plan", "engine", "stream_engine", "views", "communicator")
        yield from _imports_none_of(module, *(f"microddp.{name}" for name in names))


def engine_names_no_algorithm(module: Module) -> Iterator[str]:
    if not _within(module.name, "microddp.engine", "microddp.stream_engine", "microddp.views"):
        return
    yield from _imports_none_of(module, *(f"microddp.schedule.{name}" for name in ALGORITHMS))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and node.value in ALGORITHMS:
            yield f"line {node.lineno}: names the algorithm {node.value!r}"


def cli_is_imported_by_main_only(module: Module) -> Iterator[str]:
    if not _within(module.name, "microddp.cli", "microddp.__main__"):
        yield from _imports_none_of(module, "microddp.cli")


def imports_go_down_the_layers(module: Module) -> Iterator[str]:
    level = {name: index for index, names in enumerate(LAYERS) for name in names}
    parts = module.name.split(".")
    if parts[0] != "microddp" or len(parts) == 1 or parts[1] not in level:
        return
    above = [name for name in level if level[name] > level[parts[1]]]
    yield from _imports_none_of(module, *(f"microddp.{name}" for name in above))


def functions_are_short(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if length > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {length} lines; {MAX_FUNCTION_LINES} are the limit"


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def public_names_are_sorted(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            if names != sorted(set(names), key=_sort_key):
                yield f"line {node.lineno}: __all__ should be {sorted(set(names), key=_sort_key)}"


def _sort_key(name: str) -> tuple[object, ...]:
    """Constants, then classes, then the rest, each in natural order: as ruff sorts."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return (kind, *(part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)))


def file_is_short(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines; {MAX_FILE_LINES} are the limit"


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    kernels_know_no_ranks,
    schedule_is_pure,
    plan_is_pure,
    movers_know_no_schedules,
    engine_names_no_algorithm,
    cli_is_imported_by_main_only,
    imports_go_down_the_layers,
    functions_are_short,
    public_names_are_sorted,
    file_is_short,
)


def find_cycle(modules: list[Module]) -> list[str]:
    """The names along one cycle of imports that run when a module is loaded, or nothing."""
    edges = {each.name: {i.name for i in each.imports if not i.deferred} & each.known for each in modules}
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in finished:
            for target in sorted(edges.get(name, set())):
                if cycle := visit(target, [*path, name]):
                    return cycle
            finished.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(edges))), [])

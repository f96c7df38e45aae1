"""Imports of the product's modules, as written in their sources: closures, circles, and the widest dataclasses."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("adapters", "engine", "kernels", "memory", "registry", "server")
PARTS = (*CORE, "manylora", "benchmarks")
CHAT_ROUTE = "server/generation/routes.py"
FRONT = "manylora/__init__.py"
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Dataclass:
    """A dataclass or msgspec struct of the product."""

    file: str
    name: str
    num_fields: int


@dataclass(slots=True)
class Module:
    """Imports of the product, by file."""

    runs: set[str] = field(default_factory=set)
    """Imported when the module is."""
    types: set[str] = field(default_factory=set)
    """Imported under `if TYPE_CHECKING`."""
    later: set[str] = field(default_factory=set)
    """Imported inside a function."""


@cache
def files(parts: tuple[str, ...] = PARTS) -> tuple[str, ...]:
    """Tracked Python files of these parts. The links in `manylora/` are no files."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return tuple(name for name in tracked.stdout.split() if name.split("/")[0] in parts)


def modules(parts: tuple[str, ...] = PARTS) -> list[str]:
    """Files that hold code: an `__init__.py` with a docstring alone is none, nor is the front that users import."""
    return [
        name
        for name in files(parts)
        if name != FRONT and (not name.endswith("__init__.py") or _has_code(name))
    ]


def folder_of(file: str) -> str:
    return file.rpartition("/")[0]


@cache
def imports() -> Mapping[str, Module]:
    """Imports of every module."""
    names = {_module_name(file): file for file in files()}
    return {file: _imports_of(file, names) for file in files()}


def graph(*, with_types: bool, with_later: bool = False) -> Graph:
    """Imports of each module, without packages that hold a docstring alone."""
    known = set(modules())
    return {
        file: frozenset(
            (
                module.runs
                | (module.types if with_types else set())
                | (module.later if with_later else set())
            )
            & known - {file}
        )
        for file, module in imports().items()
        if file in known
    }


def closure(start: str, edges: Graph) -> set[str]:
    """Modules that are reached from one, and it."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += edges[file]
    return found


def folders(edges: Graph) -> Graph:
    """Graph of imports among folders; the modules at a package's root are a folder beside its others."""
    between: dict[str, set[str]] = defaultdict(set)
    for file, targets in edges.items():
        own = folder_of(file)
        between[own] |= {folder_of(target) for target in targets} - {own}
    return {folder: frozenset(targets) for folder, targets in between.items()}


def circles(edges: Graph) -> list[list[str]]:
    """Nodes that reach each other, of each circle (Tarjan's strongly connected components), largest first."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        stack.append(node)
        for target in sorted(edges[node]):
            if target not in numbers:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], numbers[target])
        if lowest[node] == numbers[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in numbers:
            visit(node)
    return sorted(found, key=lambda circle: (-len(circle), circle))


def dataclasses() -> Iterator[Dataclass]:
    """Dataclasses and structs, with the number of their own fields."""
    for file in files():
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.ClassDef) and _is_dataclass(node):
                names = [
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign)
                    and isinstance(each.target, ast.Name)
                    and "ClassVar" not in ast.unparse(each.annotation)
                ]
                yield Dataclass(file, node.name, len(names))


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def _has_code(file: str) -> bool:
    return any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in _tree(file).body
    )


def _module_name(file: str) -> str:
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "manylora" else ["manylora", *parts])


def _imports_of(file: str, names: Mapping[str, str]) -> Module:
    module = Module()

    def look(nodes: Iterable[ast.AST], found: set[str]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.update(names[name] for name in _imported(node, names))
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                look(node.body, module.types)
                look(node.orelse, found)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                look(node.body, module.later)
            else:
                look(ast.iter_child_nodes(node), found)

    look(_tree(file).body, module.runs)
    return module


def _imported(node: ast.Import | ast.ImportFrom, names: Mapping[str, str]) -> Iterator[str]:
    """Modules of the product that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if each.name in names)
    elif node.module is not None and node.module in names:
        for each in node.names:
            below = f"{node.module}.{each.name}"
            yield below if below in names else node.module


def _is_dataclass(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    return any("dataclass" in ast.unparse(each) or "Struct" in ast.unparse(each) for each in marks)

"""Count habits that make the code hard to read; fail where one is above its budget.

A budget is the number of places that the product still has. It may only fall: after an improvement, write the lower
number here. `python scripts/house_lint.py FILE ...` lists all places in these files.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = (
    "adapters",
    "benchmarks",
    "engine",
    "kernels",
    "manylora",
    "memory",
    "registry",
    "scripts",
    "server",
)
MOST_FIELDS = 20
MOST_PARAMETERS = 8
WIDE_DATACLASSES = {"EngineStatus", "UsageEvent"}
"""Wire formats and settings: their fields are as many as the facts that they carry."""
WIDE_SIGNATURES = ("kernels/triton/", "manylora/cli/")
"""Kernels take plain numbers, and each option of a command is a parameter."""

QUESTION = re.compile(r"(What|Whether|How)\b")
HANGING = re.compile(r"(Of|Those|The same|And|But|It|This)\b|\.\.\.")
VAGUE_NUMBER = re.compile(
    r"\bso\s+(many|long)\b(?!\s+(as|that))|\bso\s+far\s+(away|ahead|behind)\b"
)

Place = tuple[int, str]
"""A line and what stands there."""


@dataclass(frozen=True, slots=True)
class File:
    """A parsed file of the product."""

    path: str
    source: str
    tree: ast.Module

    @classmethod
    def read(cls, path: str, source: str) -> File:
        """Parse a file."""
        return cls(path, source, ast.parse(source))

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Line and text of each docstring, those under attributes included."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield node.lineno, text

    def comments(self) -> Iterator[tuple[int, str]]:
        """Line and text of each comment."""
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def parallel_assignments(file: File) -> Iterator[Place]:
    """Find `a, b = x, y`; in an exchange like `a, b = b, a`, a value uses what another one is assigned to."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple) and not _is_exchange(target.elts, node.value.elts):
                yield node.lineno, ast.unparse(node)
                break


def _is_exchange(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    if any(isinstance(each, ast.Starred) for each in values):
        return True
    assigned = [ast.unparse(target) for target in targets]
    used = [{ast.unparse(part) for part in ast.walk(value)} for value in values]
    return any(
        name in names
        for place, name in enumerate(assigned)
        for other, names in enumerate(used)
        if place != other
    )


def spread_literals(file: File) -> Iterator[Place]:
    """Find `*("a", "b")`, whose elements could stand there themselves."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, ast.unparse(node)


def question_docstrings(file: File) -> Iterator[Place]:
    """Find docstrings that begin with a question word instead of the thing."""
    return ((line, text) for line, text in file.docstrings() if QUESTION.match(text))


def hanging_docstrings(file: File) -> Iterator[Place]:
    """Find docstrings that need the line above to be understood."""
    return ((line, text) for line, text in file.docstrings() if HANGING.match(text))


def vague_numbers(file: File) -> Iterator[Place]:
    """Find sentences that speak of a number without saying it."""
    texts = [*file.docstrings(), *file.comments()]
    return ((line, text) for line, text in texts if VAGUE_NUMBER.search(text))


def wide_dataclasses(file: File) -> Iterator[Place]:
    """Find dataclasses with many fields that are neither wire formats nor settings."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ClassDef) or node.name in WIDE_DATACLASSES:
            continue
        fields = sum(
            isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
            for each in node.body
        )
        is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        if is_dataclass and fields > MOST_FIELDS:
            yield node.lineno, f"{node.name} has {fields} fields"


def wide_signatures(file: File) -> Iterator[Place]:
    """Find functions with many parameters that are neither kernels nor commands."""
    if file.path.startswith(WIDE_SIGNATURES):
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > MOST_PARAMETERS:
                yield node.lineno, f"{node.name} has {count} parameters"


@dataclass(frozen=True, slots=True)
class Rule:
    """One habit: its search, and the number of places that the product may have."""

    name: str
    find: Callable[[File], Iterator[Place]]
    budget: int


RULES = (
    Rule("parallel assignments of unrelated values", parallel_assignments, 2),
    Rule("literals spread where their elements could stand", spread_literals, 0),
    Rule("docstrings that begin with What, Whether or How", question_docstrings, 0),
    Rule("docstrings that hang on the line above", hanging_docstrings, 0),
    Rule('"so many", "so long" for a number', vague_numbers, 0),
    Rule(f"dataclasses with more than {MOST_FIELDS} fields", wide_dataclasses, 0),
    Rule(f"functions with more than {MOST_PARAMETERS} parameters", wide_signatures, 1),
)


def product_files() -> list[str]:
    """Tracked Python files of the product and of its scripts."""
    done = subprocess.run(
        ["git", "ls-files", *(f"{part}/**.py" for part in PARTS)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def report(files: list[File], rules: tuple[Rule, ...], lists_all: bool = False) -> bool:
    """Print each rule's count beside its budget, and the places where it is above it; return if one is."""
    is_over = False
    for rule in rules:
        places = [(file.path, *place) for file in files for place in sorted(rule.find(file))]
        print(f"{len(places):5} of {rule.budget:5}  {rule.name}")
        if len(places) > rule.budget or lists_all:
            for path, line, text in places:
                print(f"    {path}:{line}: {' '.join(text.split())[:120]}")
        is_over |= len(places) > rule.budget
    return is_over


def main(paths: list[str]) -> int:
    """Check the product against the budgets, or list all places of these files."""
    files = [File.read(path, Path(path).read_text()) for path in paths or product_files()]
    is_over = report(files, RULES, lists_all=bool(paths))
    docstrings = sum(len(list(file.docstrings())) for file in files)
    print(f"{len(files):,} files with {docstrings:,} docstrings")
    return int(is_over and not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

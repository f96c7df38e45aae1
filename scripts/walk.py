"""Counts what a reader of a chat completion walks through; scripts/walk calls it.

A server of the demo model is started, and answers chats. All calls in the product's files are recorded, in the server,
in the process that renders chats, and in the engine. A walk has three stretches: the request up to the engine, the
engine's steps, and the answer. In each, a module counts where it is entered first. A change of folder is a module that
is entered after one of another folder.

Calls that one of several chats does without are left out: heartbeats, sweeps, and looks at the database.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path

import import_graph
from import_graph import CHAT_ROUTE, CORE, ROOT, folder_of
from manylora_server import ManyloraServer, manylora_server

QUESTIONS = tuple(f"Where is the {thing}?" for thing in ("milk", "soap", "rice", "salt", "bread"))
TENANT = "walker"
ADAPTER = "pirate"
QUIET_S = 0.5
CHEAP_LINES = 12
SHOWN = 12
STRETCHES = ("request", "step", "answer")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of the product."""

    at_ns: int
    pid: int
    line: int
    """First line of the function."""
    file: str

    @property
    def function(self) -> tuple[str, int]:
        """File and line of the function."""
        return self.file, self.line


@dataclass(slots=True)
class Walk:
    """Functions of each stretch in the order of their first calls."""

    functions: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        """Files of all functions."""
        return {file for stretch in self.functions.values() for file, _ in stretch}

    def stays(self, stretch: str) -> list[tuple[str, list[str]]]:
        """Folders in the order of the walk, each with the modules that are entered there first."""
        entered = dict.fromkeys(file for file, _ in self.functions[stretch])
        return [(folder, list(stay)) for folder, stay in groupby(entered, key=folder_of)]

    @property
    def num_changes(self) -> int:
        """Changes of folder in all stretches."""
        return sum(len(self.stays(stretch)) - 1 for stretch in STRETCHES)

    @property
    def num_changes_with_returns(self) -> int:
        """Changes of folder for a reader of each function where it is called first, who comes back for others."""
        functions = [function for stretch in STRETCHES for function in self.functions[stretch]]
        return len(list(groupby(folder_of(file) for file, _ in functions))) - 1


class Recorder:
    """Calls of a server's processes, read from the pipe to which `walk_recorder` reports."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "gate"
        self._gate.write_bytes(b"\0")
        os.mkfifo(folder / "calls")
        self._pipe = os.open(folder / "calls", os.O_RDWR)
        self._received = bytearray()
        threading.Thread(target=self._receive, daemon=True).start()
        product = tuple(f"{ROOT}/{part}/" for part in import_graph.PARTS)
        source = Path(__file__).with_name("walk_recorder.py").read_text(encoding="utf-8")
        (folder / "sitecustomize.py").write_text(
            f"{source}\n\nbegin({str(folder)!r}, {product!r})\n"
        )

    @contextmanager
    def calls(self) -> Iterator[list[Call]]:
        """Calls made inside the context; the list is full after it."""
        found: list[Call] = []
        self._received.clear()
        self._open(b"\1")
        yield found
        self._open(b"\0")
        time.sleep(QUIET_S)
        for line in self._received.decode().splitlines():
            at_ns, pid, first_line, path = line.split(" ", 3)
            file = str(Path(path).resolve().relative_to(ROOT))  # parts are imported by links
            found.append(Call(int(at_ns), int(pid), int(first_line), file))
        found.sort(key=lambda call: call.at_ns)

    def _open(self, state: bytes) -> None:
        with self._gate.open("r+b") as file:
            file.write(state)

    def _receive(self) -> None:
        while True:
            self._received += os.read(self._pipe, 1 << 16)


def walk_of(runs: list[list[Call]]) -> Walk:
    """The walk of the first of some requests, without what one of the others does not call."""
    common = set.intersection(*({call.function for call in run} for run in runs))
    calls = [call for call in runs[0] if call.function in common]
    submitted = next(call for call in calls if call.function == _submit())
    stretches: dict[str, dict[tuple[str, int], None]] = {stretch: {} for stretch in STRETCHES}
    for call in calls:
        of_server = "request" if call.at_ns < submitted.at_ns else "answer"
        stretch = "step" if call.pid == submitted.pid else of_server
        stretches[stretch].setdefault(call.function)
    return Walk({stretch: list(functions) for stretch, functions in stretches.items()})


@cache
def _submit() -> tuple[str, int]:
    """The function by which the engine takes a request in."""
    file = "engine/core.py"
    return file, next(line for line, (name, _) in _functions(file).items() if name == "submit")


@cache
def _functions(file: str) -> dict[int, tuple[str, int]]:
    """Name and number of lines of a file's functions, by their first line; that of a decorator counts."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): (
            node.name,
            (node.end_lineno or node.lineno) - node.lineno + 1,
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def record() -> tuple[Walk, Walk]:
    """Walks of a request whose adapter is in use, and of the first one of an adapter."""
    with tempfile.TemporaryDirectory(prefix="walk-") as made:
        folder = Path(made)
        recorder = Recorder(folder)
        with manylora_server(folder / "server", PYTHONPATH=str(folder)) as server:
            server.publish(TENANT, ADAPTER, "french")
            server.ask(TENANT, "french", QUESTIONS[0])
            first = _recorded(recorder, server, QUESTIONS[0])
            return walk_of([_recorded(recorder, server, each) for each in QUESTIONS]), walk_of(
                [first]
            )


def _recorded(recorder: Recorder, server: ManyloraServer, question: str) -> list[Call]:
    with recorder.calls() as calls:
        server.ask(TENANT, ADAPTER, question)
    return calls


def print_walk(walk: Walk, first: Walk) -> None:
    """Print the way of a request, and what is cheap to leave out of it."""
    for stretch in STRETCHES:
        stays = walk.stays(stretch)
        files = {file for file, _ in walk.functions[stretch]}
        print(f"\n{stretch}: {len(files)} modules, {len(stays) - 1} changes of folder")
        for folder, stay in stays:
            print(f"  {folder:24} {' '.join(Path(file).stem for file in stay)}")
    print(f"\nfirst request of an adapter, {len(first.modules - walk.modules)} modules more:")
    print(*(f"  {file}" for file in sorted(first.modules - walk.modules)), sep="\n")
    print("\ncheapest to leave out: modules by the lines of those functions that are called")
    lines: Counter[str] = Counter()
    names: dict[str, set[str]] = defaultdict(set)
    for stretch in STRETCHES:
        for file, line in walk.functions[stretch]:
            name, num_lines = _functions(file).get(line, ("", 0))
            if name and name not in names[file]:
                names[file].add(name)
                lines[file] += num_lines
    for file, count in sorted(lines.items(), key=lambda item: item[1]):
        if count <= CHEAP_LINES:
            print(f"  {count:3}  {file:44} {' '.join(sorted(names[file]))}")


def print_imports() -> None:
    """Print closures, circles and the widest dataclasses."""
    runs = import_graph.graph(with_types=False)
    types = import_graph.graph(with_types=True)
    everything = import_graph.graph(with_types=True, with_later=True)
    closure = import_graph.closure(CHAT_ROUTE, types)
    print(f"\ncore modules: {len(import_graph.modules(CORE))}")
    print(
        f"imported by the chat route: {len(import_graph.closure(CHAT_ROUTE, runs))}, "
        f"with type imports {len(closure)}"
    )
    print("\nof these, most would go with the imports of")
    for count, file in sorted(_savings(closure, types), reverse=True)[:SHOWN]:
        importers = sorted(each for each in closure if file in types[each])
        print(f"  {count:3}  {file:36} by {' '.join(importers)}")
    print("\ncircles of modules between folders:")
    for circle in import_graph.circles(everything):
        if len({folder_of(file) for file in circle}) > 1:
            print(" ", *circle)
    print("\ncircles of folders:")
    for circle in import_graph.circles(import_graph.folders(everything)):
        print(" ", *circle)
    print("\nwidest dataclasses:")
    widest = sorted(import_graph.dataclasses(), key=lambda each: -each.num_fields)
    for each in widest[:SHOWN]:
        print(f"  {each.num_fields:3}  {each.name:20} {each.file}")


def _savings(closure: set[str], edges: import_graph.Graph) -> Iterator[tuple[int, str]]:
    """Modules that a closure would lose without one of its modules, with that one."""
    for file in closure - {CHAT_ROUTE}:
        without = {each: targets - {file} for each, targets in edges.items()}
        yield len(closure) - len(import_graph.closure(CHAT_ROUTE, without)), file


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/walk", description=__doc__)
    parser.add_argument(
        "--imports", action="store_true", help="start no server; print imports only"
    )
    if not parser.parse_args().imports:
        walk, first = record()
        print_walk(walk, first)
        print(
            f"\nall: {len(walk.modules)} modules, {walk.num_changes} changes of folder; "
            f"{walk.num_changes_with_returns} when functions are read one by one"
        )
    print_imports()
    return 0


if __name__ == "__main__":
    sys.exit(main())

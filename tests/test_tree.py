"""The tree stays small: modules in a package, modules of the core, and what the chat route imports."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("adapters", "engine", "kernels", "memory", "registry", "server")
PARTS = (*CORE, "manylora", "benchmarks")
MOST_IN_A_PACKAGE = 16
MOST_IN_THE_CORE = 290
MOST_OF_THE_CHAT_ROUTE = 90


def modules(parts: tuple[str, ...]) -> list[Path]:
    """The modules of these parts, without the `__init__.py` of packages and without the links in `manylora/`."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in map(Path, tracked.stdout.split()) if path.parts[0] in parts and path.name != "__init__.py"]


def test_no_package_has_more_modules_than_a_reader_takes_in() -> None:
    counts = Counter(path.parent for path in modules(PARTS))
    assert {str(folder): count for folder, count in counts.items() if count > MOST_IN_A_PACKAGE} == {}


def test_the_core_stays_small() -> None:
    assert len(modules(CORE)) <= MOST_IN_THE_CORE


def test_a_chat_request_is_served_by_few_modules() -> None:
    code = (
        "import sys, manylora.server.generation.routes\n"
        "parts = [name for name, module in sys.modules.items() if name.split('.')[0] == 'manylora']\n"
        "print(len(parts))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= MOST_OF_THE_CHAT_ROUTE

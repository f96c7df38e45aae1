"""The tree stays small, and JSON of strangers has one reader."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("adapters", "engine", "kernels", "memory", "registry", "server")
PARTS = (*CORE, "manylora", "benchmarks")
MOST_IN_A_PACKAGE = 16
MOST_IN_THE_CORE = 316
MOST_OF_THE_CHAT_ROUTE = 94


def modules(parts: tuple[str, ...]) -> list[Path]:
    """The modules of these parts, without the `__init__.py` of packages and without the links in `manylora/`."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        path
        for path in map(Path, tracked.stdout.split())
        if path.parts[0] in parts and path.name != "__init__.py"
    ]


def test_no_package_has_more_modules_than_a_reader_takes_in() -> None:
    counts = Counter(path.parent for path in modules(PARTS))
    assert {
        str(folder): count for folder, count in counts.items() if count > MOST_IN_A_PACKAGE
    } == {}


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


PLAIN_JSON = {
    # What we or our own processes wrote, or files of the installation.
    "adapters/residency/loader.py": 1,
    "engine/grammar/json_schema.py": 1,
    "engine/process/messages.py": 1,
    "kernels/triton/plans.py": 1,
    "manylora/cli/demo/round.py": 1,
    "manylora/cli/demo/traffic.py": 2,
    "registry/usage/ledger.py": 1,
    "server/cluster/launch/ray_serve.py": 1,
    "server/sandbox/grammar_check.py": 2,
    "server/sandbox/processes.py": 1,
    "server/sandbox/worker.py": 3,
    "server/tools/formats.py": 1,
    # Files of the base model that transformers and tokenizers read in the same way.
    "engine/grammar/matcher.py": 2,
    "engine/model/quantise.py": 1,
    "engine/text/tokenizer.py": 1,
    # Typed: each message has a class, and what does not fit is refused.
    "server/cluster/links.py": 1,
    "server/cluster/route_fields.py": 1,
    # What the model wrote: numbers stay as they are.
    "server/messages/writer.py": 1,
    # Answers of a server that the user has named.
    "manylora/client/answers.py": 1,
    # The readers themselves.
    "manylora/strict_json.py": 3,
}
"""Where plain readers of JSON are called, and how often. All that strangers send goes through `strict_json`."""
READER = re.compile(
    r"(?<!strict_)\b(?:or)?json\.loads?\(|msgspec\.json\.[dD]ecoder?\(|validate_json\(|JSONDecoder"
)


def test_plain_readers_of_json_are_where_no_stranger_writes() -> None:
    found = Counter[str]()
    for path in modules((*CORE, "manylora")):
        found[str(path)] += len(READER.findall((ROOT / path).read_text(encoding="utf-8")))
    package = (
        "manylora/cli/cluster/__init__.py"  # the plan that `cluster up` writes for its own child
    )
    assert READER.findall((ROOT / package).read_text(encoding="utf-8")) == ["json.loads("]
    assert {path: count for path, count in found.items() if count} == PLAIN_JSON

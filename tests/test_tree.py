"""The tree stays small, and JSON of strangers has one reader."""

from __future__ import annotations

import re
from collections import Counter

from import_graph import (
    CHAT_ROUTE,
    CORE,
    ROOT,
    circles,
    closure,
    dataclasses,
    files,
    folder_of,
    folders,
    graph,
)

MOST_IN_A_FOLDER = 16
MOST_IN_THE_CORE = 312
MOST_OF_THE_CHAT_ROUTE = 76
MOST_OF_ITS_TYPES = 132
"""Modules that the chat route imports, for types too. The goal is 80."""
MOST_FIELDS = 20
WIRE_FORMATS = {"EngineStatus", "UsageEvent"}
"""Dataclasses that may be as wide as what they are read from or written to."""
WIDE = {"RequestState", "Services"}
"""Dataclasses that are still to be taken apart."""
CIRCLES_OF_MODULES: list[set[str]] = [
    {
        "server/adapters/staged_files.py",
        "server/adapters/upload_guards.py",
        "server/services.py",
        "server/status/metrics.py",
        "server/status/readiness.py",
    },
    {
        "engine/fairness/inner_order.py",
        "engine/fairness/shares.py",
        "engine/scheduling/plan.py",
        "engine/scheduling/request_state.py",
    },
]
"""Modules of several folders that import each other, types counted; still to be taken apart."""
CIRCLES_OF_FOLDERS: list[set[str]] = [
    {
        "server",
        "server/adapters",
        "server/auth",
        "server/batches",
        "server/cluster",
        "server/generation",
        "server/http",
        "server/limits",
        "server/messages",
        "server/responses",
        "server/sandbox",
        "server/status",
        "server/tenants",
        "server/tools",
        "server/usage",
        "server/vllm",
    },
    {
        "engine",
        "engine/execution",
        "engine/fairness",
        "engine/grammar",
        "engine/scheduling",
        "engine/text",
    },
    {"kernels", "kernels/flashinfer", "kernels/native", "kernels/plain", "kernels/triton"},
    {"benchmarks", "benchmarks/engine"},
    {"registry", "registry/usage"},
    {"registry/db", "registry/db/migrations"},
]
"""Folders that import each other, types counted; still to be taken apart. The root of a package counts as a folder: in
most of these it holds both what its folders share and what puts them together."""


def modules(parts: tuple[str, ...]) -> list[str]:
    """The modules of these parts, without the `__init__.py` of packages and without the links in `manylora/`."""
    return [file for file in files(parts) if not file.endswith("__init__.py")]


def test_no_folder_has_more_modules_than_a_reader_takes_in() -> None:
    counts = Counter(folder_of(file) for file in files() if not file.endswith("__init__.py"))
    assert {folder: count for folder, count in counts.items() if count > MOST_IN_A_FOLDER} == {}


def test_the_core_stays_small() -> None:
    assert len(modules(CORE)) <= MOST_IN_THE_CORE


def test_a_chat_request_is_served_by_few_modules() -> None:
    assert len(closure(CHAT_ROUTE, graph(with_types=False))) <= MOST_OF_THE_CHAT_ROUTE
    assert len(closure(CHAT_ROUTE, graph(with_types=True))) <= MOST_OF_ITS_TYPES


def test_no_dataclass_is_a_bag() -> None:
    wide = {each.name for each in dataclasses() if each.num_fields > MOST_FIELDS}
    assert wide <= WIRE_FORMATS | WIDE


def test_modules_of_several_folders_import_each_other_nowhere_else() -> None:
    across = [
        circle
        for circle in circles(graph(with_types=True, with_later=True))
        if len({folder_of(file) for file in circle}) > 1
    ]
    assert beyond(across, CIRCLES_OF_MODULES) == []


def test_folders_import_each_other_nowhere_else() -> None:
    found = circles(folders(graph(with_types=True, with_later=True)))
    assert beyond(found, CIRCLES_OF_FOLDERS) == []


def beyond(found: list[list[str]], known: list[set[str]]) -> list[list[str]]:
    """Circles that are no part of a known one."""
    return [circle for circle in found if not any(set(circle) <= each for each in known)]


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
    "engine/model/checkpoint/quantise.py": 1,
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
        found[path] += len(READER.findall((ROOT / path).read_text(encoding="utf-8")))
    package = (
        "manylora/cli/cluster/__init__.py"  # the plan that `cluster up` writes for its own child
    )
    assert READER.findall((ROOT / package).read_text(encoding="utf-8")) == ["json.loads("]
    assert {path: count for path, count in found.items() if count} == PLAIN_JSON

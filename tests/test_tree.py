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
MOST_IN_THE_CORE = 295
MOST_OF_THE_CHAT_ROUTE = 62
MOST_OF_ITS_TYPES = 72
"""Modules that the chat route imports, for types too. The goal is 80."""
MOST_FIELDS = 20
WIRE_FORMATS = {"EngineStatus", "UsageEvent"}
"""Dataclasses that may be as wide as what they are read from or written to."""
ROOTS_IN_CIRCLES = {"benchmarks", "engine", "kernels", "registry", "registry/db", "server"}
"""Packages whose root holds both what its folders share and what puts them together; no further ones."""


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
    assert wide == WIRE_FORMATS


def test_no_modules_of_several_folders_import_each_other() -> None:
    found = circles(graph(with_types=True, with_later=True))
    assert [circle for circle in found if len({folder_of(file) for file in circle}) > 1] == []


def test_no_folders_import_each_other_but_a_package_and_what_is_in_it() -> None:
    between = folders(graph(with_types=True, with_later=True))
    apart = {
        folder: frozenset(
            target
            for target in targets
            if not f"{folder}/".startswith(f"{target}/")
            and not f"{target}/".startswith(f"{folder}/")
        )
        for folder, targets in between.items()
    }
    assert circles(apart) == []
    assert {min(circle, key=len) for circle in circles(between)} <= ROOTS_IN_CIRCLES


PLAIN_JSON = {
    # What we or our own processes wrote, or files of the installation.
    "adapters/residency/loader.py": 1,
    "engine/grammar/json_schema.py": 1,
    "engine/process/messages.py": 1,
    "kernels/triton/plans.py": 1,
    "manylora/cli/demo/round.py": 1,
    "manylora/cli/demo/traffic.py": 1,
    "manylora/launch/ray_serve.py": 1,
    "registry/usage/ledger.py": 1,
    "server/sandbox/processes.py": 1,
    "server/sandbox/worker.py": 2,
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

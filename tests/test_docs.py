"""What the documents name must exist, and the settings and answers they quote must be the real ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.server.settings import setting_names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
INSIDE_THE_MAP = {
    *(
        "manylora/demo",
        "manylora/cli/cluster",
        "server/cluster/launch",
        "manylora/cli/demo",
        "manylora/cli/ps",
        "registry/db/migrations",
        "registry/db/migrations/versions",
    ),
    *("manylora/client", "kernels/plain", "kernels/native", "kernels/triton", "kernels/flashinfer"),
    *("engine/model/checkpoint", "engine/model/formats"),
}
"""Packages whose parent's row speaks for them."""
DOCUMENTS = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_named_in_documents_exist(document: str) -> None:
    sections = "|".join(sorted({name.split(".")[0] for name in setting_names()}))
    text = (ROOT / document).read_text()
    named = set(re.findall(rf"`((?:{sections})\.(?!py`)[a-z_]+)`", text))
    assert named - {"server.overloaded"} <= set(setting_names()), "that one is a code of errors"


def test_the_page_of_settings_is_that_of_the_config() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "settings_page.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for path in re.findall(
        r"`((?:scripts|tests|benchmarks|engine|server|adapters|kernels|memory|registry|manylora|deploy|docs)/[a-z0-9_/.]+)`",
        text,
    ):
        assert (ROOT / path).exists(), path
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    names = {Path(path).name for path in tracked}
    for name in re.findall(r"`([a-z_]+\.py)`", text):
        assert name in names, name


def test_the_map_has_every_package_and_where_to_begin_in_it() -> None:
    rows = [
        line.split(" | ")
        for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    folders = {row[0].strip("| `/"): row for row in rows if "/`" in row[0]}
    parts = (
        "manylora",
        "adapters",
        "benchmarks",
        "engine",
        "kernels",
        "memory",
        "registry",
        "server",
    )
    found = {
        str(init.parent.relative_to(ROOT))
        for part in parts
        for init in (ROOT / part).rglob("__init__.py")
    }
    assert found - set(folders) == INSIDE_THE_MAP
    for folder, row in folders.items():
        for name in re.findall(r"`([a-z_]+\.py)`", row[-1]):
            assert (ROOT / folder / name).exists(), f"{folder}/{name}"


def test_the_demo_answers_in_the_readme_are_the_tested_ones() -> None:
    expected = json.loads((ROOT / "manylora" / "demo" / "expected.json").read_text())
    question = next(entry for entry in expected["questions"] if f'"{entry["question"]}"' in README)
    for name, answer in question["answers"].items():
        line = next(
            line
            for line in README.splitlines()
            if line.startswith(f" {'manylora-demo' if name == 'base' else name} ")
        )
        assert line.endswith(answer)


def test_the_figures_in_the_readme_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "readme_speed.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0

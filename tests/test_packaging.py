"""The package table, the links in weft/ and the folders must tell the same story."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PARTS = ("adapters", "benchmarks", "engine", "kernels", "memory", "registry", "server")


def test_each_part_is_linked_into_the_package() -> None:
    links = {path.name: path for path in (ROOT / "weft").iterdir() if path.is_symlink()}
    assert sorted(links) == sorted(PARTS)
    for name, link in links.items():
        assert link.readlink() == Path("..") / name


def test_the_table_maps_each_part_to_its_folder() -> None:
    assert SETTINGS["package-dir"] == {f"weft.{part}": part for part in PARTS}


def test_every_folder_with_modules_is_in_the_table() -> None:
    folders = {"weft", "weft.demo"}
    for part in PARTS:
        for init in (ROOT / part).rglob("__init__.py"):
            folders.add("weft." + ".".join(init.parent.relative_to(ROOT).parts))
    assert sorted(SETTINGS["packages"]) == sorted(folders)
    lonely = {
        path.parent
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert lonely == set()


@pytest.mark.parametrize("part", PARTS)
def test_no_part_is_importable_by_its_bare_name(part: str) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({part!r}) is not None)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", ["weft", "weft.cli", "weft.registry.registry", "weft.adapters.checkpoint"])
def test_light_modules_do_not_bring_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_no_source_deserialises_or_executes_what_it_reads() -> None:
    """No pickle and no relatives of it in the product: neither files nor messages may run code."""
    forbidden = ("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
    calls = ("torch.load(", "recv_pyobj", "send_pyobj", "allow_pickle=True", "trust_remote_code=True", "yaml.load(")
    found = []
    for part in (*PARTS, "weft"):
        for path in (ROOT / part).rglob("*.py"):
            text = path.read_text()
            words = [f"import {word}" for word in forbidden] + [f"from {word}" for word in forbidden] + list(calls)
            found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []

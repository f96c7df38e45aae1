from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.benchmarks.main import main
from shop_window import ShopWindow, shop_window


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Coverage leaves out what these test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture
def server() -> Iterator[ShopWindow]:
    with shop_window() as window:
        yield window


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a benchmark with these options, and read the results that it writes."""

    def run(name: str, options: str, *more: str) -> dict[str, Any]:
        path = tmp_path / "result.json"
        assert main(name, [*options.split(), *more, "--json", str(path)]) == 0
        result: dict[str, Any] = json.loads(path.read_text())
        assert result["hardware"]["cores"] >= 1
        return result

    return run

"""What becomes of results: figures in documents, plots, and the promises that committed results must keep."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


def committed(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def test_the_readme_has_four_rows_of_committed_figures_and_a_link_to_all(
    script: Callable[[str], ModuleType],
) -> None:
    head, *table = script("readme_speed").speed_section().splitlines()
    assert "(docs/benchmarks.md)" in head
    names = [row.split(" | ")[0] for row in table if row.startswith("| ")]
    assert [name.partition(",")[0] for name in names[1:]] == [
        *("| base", "| 8 mixed adapters", "| base", "| base and 8 mixed adapters")
    ]


def test_links_of_a_page_below_the_repository_lead_up_to_the_results(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = script("readme_speed")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "SECTIONS", {"one": lambda: "[Plot](benchmarks/a.svg)\n"})
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.md"
    page.write_text("<!-- one: scripts/readme_speed.py -->\nold\n<!-- end of one -->\n")
    text = figures.with_figures(page)
    assert text.splitlines()[1] == "[Plot](../benchmarks/a.svg)"


def test_figures_are_written_with_their_spread_their_command_and_their_goals(
    script: Callable[[str], ModuleType],
) -> None:
    figures = script("readme_speed")
    overhead = {"median": 0.05, "min": 0.04, "max": 0.06}
    line = figures.overhead_line(
        {"command": "c", "load": {"requests": 32}, "share of a step": {"all": overhead}}
    )
    assert "take **5.0%** of a step of 32 requests (4.0% to 6.0%; `c`)" in line
    goals = [{"goal": "TTFT", "figure": 25.0, "should be": "most", "limit": 30.0, "ok": True}]
    goals += [{"goal": "goodput", "figure": None, "should be": "least", "limit": 0.9, "ok": False}]
    assert figures.table_lines({"table": [{"times": 20.0, "goodput": None}], "goals": goals}) == [
        *(
            "| times | goodput |",
            "|---|---|",
            "| 20 | - |",
            "",
            "| | figure | goal | |",
            "|---|---|---|---|",
        ),
        *("| TTFT | 25 | at most 30 | reached |", "| goodput | - | at least 0.9 | missed |"),
    ]


def test_plots_are_small_and_the_same_every_time(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    plots = script("plot_results")
    for name in plots.PLOTS:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
        drawn = plots.draw(name, tmp_path).read_bytes()
        assert len(drawn) < 100_000
        assert not re.search(rb"<dc:date>", drawn)
    assert plots.draw(name, tmp_path).read_bytes() == drawn


def test_committed_results_keep_what_the_pool_promises() -> None:
    counts = committed("adapter-count-cpu")
    assert counts["load"]["alpha"] == 0.3
    assert counts["ratios"]["2000 / 100"]["median"] >= 0.9
    cliff = committed("cliff-cpu")
    assert cliff["load"]["room"] == 20
    assert cliff["adapters"]["40"]["share_of_limit"]["median"] <= 1
    unified = committed("unified-cpu")
    assert unified["loads"]["S2: KV cache needs more"]["ratio"]["median"] >= 1.15
    stall = committed("step-stall-cpu")
    assert stall["step_ms"]["swaps"]["count"] >= 300
    assert stall["ratios"]["swaps / quiet, p99"] <= 1.25

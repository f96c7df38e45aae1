"""What becomes of results: lines of the README and plots."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median, "repeats": [median]}


def times(value: float) -> dict[str, float]:
    return {"p50": value, "p95": 2 * value, "p99": 3 * value, "max": 4 * value}


def zipf_arm(adapters: int, ratio: float) -> dict[str, Any]:
    return {"adapters": adapters, "ratio": {"cold": spread(ratio), "warm": spread(ratio + 0.1)}}


def fact(adapters: float) -> dict[str, float]:
    return {"adapters_per_step": adapters}


ZIPF = {"arms": {"5": zipf_arm(5, 1.0), "2000": zipf_arm(2000, 0.86), "tight": zipf_arm(100, 0.8)}}
RESULTS: dict[str, dict[str, Any]] = {
    "fairness-cpu": {
        "arms": {
            "alone": {"requests": 9, "ttft_ms": times(10.0), "kept": None},
            "one": {"requests": 9, "ttft_ms": times(25.0), "kept": spread(0.97)},
            "weights": {"requests": 0, "ttft_ms": {"p50": None, "p95": None, "max": None}, "kept": spread(1.0)},
        },
        "goals": [{"goal": "one: quiet TTFT p95, ms", "limit": 60.0}, {"goal": "one: kept", "limit": 0.95}],
    },
    "overload-cpu": {
        "phases": [
            {
                "times": each,
                "goodput": 0.9,
                "ttft_ms": times(1000.0 * each),
                "quiet_ttft_ms": times(50.0),
                "refusal_ms": times(20.0) if each > 1 else dict.fromkeys(times(0)),
            }
            for each in (1.0, 20.0)
        ]
    },
    "adapters-http-cpu": ZIPF,
    "adapters-http-0.5b-cpu": ZIPF,
    "batching-cpu": {
        "modes": {
            mode: {
                load: {
                    "requests/s": spread(20 * float(load)),
                    "output tokens/s": spread(900 * float(load)),
                    "mean latency, ms": spread(500.0),
                    "p95 latency, ms": spread(900.0),
                }
                for load in ("0.5", "1")
            }
            for mode in ("static", "windowed", "continuous")
        }
    },
    "adapter-count-cpu": {
        "command": "python -P -m weft.benchmarks.pool.adapter_count",
        "load": {"room": 20},
        "output_tokens_per_s": {
            "5": spread(1500.0),
            "100": spread(1250.0),
            "1000": spread(1230.0),
            "2000": spread(1200.0),
        },
        "ratios": {"100 / 5": spread(0.83), "2000 / 100": spread(0.96)},
        "facts": {"5": fact(3.6), "100": fact(9.2), "1000": fact(11.0), "2000": fact(11.6)},
        "decode_step_ms": {
            "5": {"3": {"steps": 9, "median": 7.0}, "4": {"steps": 9, "median": 7.5}},
            "100": {"9": {"steps": 9, "median": 9.0}, "10": {"steps": 1, "median": 90.0}},
            "1000": {"11": {"steps": 9, "median": 10.0}},
            "2000": {"12": {"steps": 9, "median": 10.5}},
        },
    },
    "cliff-cpu": {
        "command": "python -P -m weft.benchmarks.pool.cliff",
        "load": {"room": 20, "load": 0.6},
        "copy_ms": 2.25,
        "adapters": {
            active: {"median_ttft_ms": {"small": spread(small), "whole": spread(20.0)}, "ratio": spread(small / 20)}
            for active, small in (("20", 20.0), ("40", 30.0))
        },
    },
    "unified-cpu": {
        "command": "python -P -m weft.benchmarks.pool.unified",
        "loads": {
            "S2: KV cache needs more": {
                "output_tokens_per_s": {"unified": spread(900.0), "split": spread(700.0)},
                "ratio": spread(1.29),
            }
        },
    },
    "step-stall-cpu": {
        "command": "python -P -m weft.benchmarks.engine.step_stall",
        "requests": 16,
        "adapters": 8,
        "ratios": {"swaps / quiet, p50": 1.12, "swaps / quiet, p99": 1.08},
        "load_ms": {"stored": {"p50": 2023.0}, "idle": {"p50": 71.0}},
    },
    "step-cpu": {
        "command": "weft bench step",
        "hardware": {"cores": 2, "cpu": "CPU"},
        "versions": {"torch": "2.13"},
        "at": "2026-11-20T00:00:00",
        "groups": {
            "linear layers": ["linear layers"],
            "LoRA": ["LoRA", "LoRA preparation"],
            **{f"group {index}": ["rope"] for index in range(3)},
        },
        "cases": {
            "decode, 32 base": {
                "step / floor": 1.5,
                "part_share": {"linear layers": 0.7, "LoRA": 0.2, "LoRA preparation": 0.05, "rope": 0.05},
            }
        },
    },
    "page-waste": {
        "command": "python -P -m weft.benchmarks.pool.page_waste",
        "adapters": [
            {"model": "A", "adapter": "q, v, rank 8", "waste": 0.3},
            {"model": "A", "adapter": "all linear, rank 8", "waste": 0.07},
            {"model": "A", "adapter": "all linear, rank 128", "waste": 0.02},
            {"model": "B", "adapter": "all linear, rank 16", "waste": 0.027},
        ],
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return tmp_path


def test_the_readme_tells_each_result_with_its_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = script("readme_speed")
    monkeypatch.setattr(readme, "RESULTS", folder)
    text = "\n".join(readme.pool_lines())
    assert "from 100 to 2,000 registered: **-4%** (-14% to +6%)" in text
    assert "from 5 to 100, where a step holds 3.6 and 9.2 different adapters: **-17%**" in text
    assert "30 ms, **1.50 times** (1.35 to 1.65) the 20 ms" in text
    assert "S2: KV cache needs more: **+29%**" in text
    assert "at most **2.7%** (A, B)" in text
    assert "**1.08 times** as long as without, the median 1.12 times. A load then takes 2.0 s" in text
    assert all(f"`{RESULTS[name]['command']}`" in text for name in readme.POOL)
    (folder / "cliff-cpu.json").unlink()
    assert len(readme.pool_lines()) == len(readme.POOL) - 1 + 3


def test_the_readme_has_four_rows_of_committed_figures_and_a_link_to_all() -> None:
    head, *table = script("readme_speed").speed_section().splitlines()
    assert "(docs/benchmarks.md)" in head
    names = [row.split(" | ")[0] for row in table if row.startswith("| ")]
    assert [name.partition(",")[0] for name in names[1:]] == [
        *("| base", "| 8 mixed adapters", "| base", "| base and 8 mixed adapters")
    ]


def test_links_of_a_page_below_the_repository_lead_up_to_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = script("readme_speed")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "SECTIONS", {"one": lambda: "[Plot](benchmarks/a.svg)\n"})
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.md"
    page.write_text("<!-- one: scripts/readme_speed.py -->\nold\n<!-- end of one -->\n")
    text = figures.with_figures(page)
    assert text.splitlines()[1] == "[Plot](../benchmarks/a.svg)"


def test_the_readme_tells_where_a_step_goes() -> None:
    table = "\n".join(script("readme_speed").step_table(RESULTS["step-cpu"]))
    assert "| decode, 32 base | **1.50** | 70% | 25% |" in table
    assert "`weft bench step`" in table


def test_the_readme_tells_a_comparison_and_what_serving_adds() -> None:
    readme = script("readme_speed")
    run = {
        **{key: RESULTS["step-cpu"][key] for key in ("hardware", "versions", "at")},
        "options": {
            "peer_name": "other",
            "peer_about": "1.0",
            "repeats": 3,
            "models": "base,a,b",
            "concurrency": 9,
            "input_tokens": "64",
            "output_tokens": "16",
        },
        "figures": {
            "Weft": {"output tokens/s": spread(30.0)},
            "other": {"output tokens/s": spread(3.0)},
        },
        "ratios": {"output tokens/s": spread(10.0), "TTFT p50 ms": spread(0.5), "TPOT p50 ms": spread(0.25)},
    }
    table = readme.compare_table([run])
    load = "base and 2 mixed adapters, 9 at once, 64 + 16 tokens, 3 rounds"
    assert table[-1] == f"| {load} | 30.0 | 3.0 | **10.00** (9.00 to 11.00) | 0.50 | 0.25 |"
    assert "Weft and other (1.0) over HTTP" in table[1]
    overhead = {"command": "c", "load": {"requests": 32}, "share of a step": {"all": spread(0.05)}}
    assert "take **5.0%** of a step of 32 requests (4.5% to 5.5%; `c`)" in readme.overhead_line(overhead)


def test_the_page_of_fairness_tells_figures_beside_their_goals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = script("readme_speed")
    monkeypatch.setattr(readme, "RESULTS", folder)
    where = {key: RESULTS["step-cpu"][key] for key in ("hardware", "versions", "at", "command")}
    goals = [{"goal": "TTFT", "figure": 25.0, "should be": "most", "limit": 30.0, "ok": True}]
    goals += [{"goal": "goodput", "figure": None, "should be": "least", "limit": 0.9, "ok": False}]
    for name in readme.FAIR:
        (folder / f"{name}.json").unlink(missing_ok=True)
    assert readme.fairness_section() == ""
    measured = {"fairness-cpu": {**RESULTS["fairness-cpu"], "goals": goals}}
    measured["overload-cpu"] = {"table": [{"times": 20.0, "goodput": None}], "goals": []}
    for name, run in measured.items():
        (folder / f"{name}.json").write_text(json.dumps({**run, **where}))
    text = readme.fairness_section()
    assert "| one | 25 ms | 50 ms | 100 ms | 2.5 | 97.0% |" in text
    assert "| weights |" not in text
    assert "| TTFT | 25 | at most 30 | reached |" in text
    assert "| goodput | - | at least 0.9 | missed |" in text
    assert "| times | goodput |\n|---|---|\n| 20 | - |" in text


def test_plots_are_small_and_the_same_every_time(folder: Path) -> None:
    plots = script("plot_results")
    assert set(plots.PLOTS) < set(RESULTS)
    for name in plots.PLOTS:
        first = plots.draw(name, folder).read_bytes()
        assert plots.draw(name, folder).read_bytes() == first
        assert len(first) < 100_000
        assert not re.search(rb"<dc:date>", first)


def test_steps_that_were_seen_too_seldom_are_not_drawn(folder: Path) -> None:
    plots = script("plot_results")
    picture = plots.draw("adapter-count-cpu", folder).read_text()
    assert "90" not in re.findall(r">(\d+)</text>", picture), "the axis would reach it"


def committed(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()))


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

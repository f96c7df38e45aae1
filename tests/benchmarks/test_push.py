"""`manylora bench push`, small: pushes to a server that it starts, what came of them, and options that contradict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from manylora import demo
from manylora.benchmarks.main import main

SMALL = "--pushes 2 --versions 22 --in-flight 2 --input-tokens 4 --output-tokens 4 --settle-s 0.2"
SERVER = "--set=memory.gib=0.05 --set=memory.host_gib=0.05 --set=model.threads=1"


@pytest.mark.slow
def test_a_small_run_times_pushes_idle_and_loaded_and_reads_the_memory(
    measure: Callable[..., dict[str, Any]],
) -> None:
    models = ["--model", str(demo.MODEL), "--adapter", str(demo.ADAPTERS / "pirate")]
    result = measure("push", f"{SMALL} {SERVER}", *models)
    for parts in result["phases"].values():
        assert [len(found["repeats"]) for found in parts.values()] == [2] * 4
        for total_ms, push_ms, ttft_ms in zip(
            *(parts[f"{part}_ms"]["repeats"] for part in ("total", "push", "ttft")), strict=True
        ):
            assert total_ms >= 0.999 * (push_ms + ttft_ms), "the push, then the request"
    assert result["load_requests"] >= 2
    assert [(row[""], row["figure"]) for row in result["table"]] == [
        (phase, f"{part}_ms")
        for phase in ("idle", "loaded")
        for part in ("push", "ttft", "total", "ttft_again")
    ]
    first, last = result["sizes"]
    figures = {goal["goal"]: goal["figure"] for goal in result["goals"]}
    assert figures == {
        "idle: push to first token, ms": result["phases"]["idle"]["total_ms"]["median"],
        "loaded: push to first token, ms": result["phases"]["loaded"]["total_ms"]["median"],
        "growth over the last pushes, MiB": pytest.approx(
            last["rss_mib"] - first["rss_mib"], abs=0.01
        ),
        "open files more than before": last["open_files"] - first["open_files"],
    }


@pytest.mark.parametrize(
    "options", [["--model", str(demo.MODEL)], ["--adapter", str(demo.ADAPTERS / "pirate")]]
)
def test_a_base_without_an_adapter_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("push", options) == 2
    assert "--model and --adapter go together" in capsys.readouterr().err

"""`manylora bench batches`, with a server that it starts, gives an adapter and ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manylora import demo


@pytest.mark.slow
def test_a_load_is_measured_alone_and_beside_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setenv("MANYLORA_REGISTRY__BLOB_URL", str(tmp_path / "of-a-real-server"))
    load = "--requests 4 --warmup 1 --output-tokens 4 --lines 6 --line-tokens 3"
    settings = "--set=memory.gib=0.05 --set=memory.host_gib=0.05 --set=model.threads=1"
    models = ["--model", str(demo.MODEL), "--adapter", str(demo.ADAPTERS / "pirate")]
    result = measure("batches", f"{load} {settings}", *models)
    assert (result["batch"]["total"], result["batch"]["completed"], result["batch"]["failed"]) == (
        6,
        6,
        0,
    )
    assert result["options"]["models"] == "base,pirate"
    assert result["alone"]["errors"] == result["beside"]["errors"] == 0
    assert result["beside"]["ttft_p95_ms"] > 0
    assert "key" not in result["options"]
    assert not (tmp_path / "of-a-real-server").exists()

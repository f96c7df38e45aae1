"""Many adapters over HTTP: the requests that it sends, and a small run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from weft.adapters.checkpoint.reader import read_checkpoint
from weft.benchmarks.main import main
from weft.benchmarks.qwen_shape import NUM_SMALL, base_config, make_small_adapters
from weft.benchmarks.workloads import zipf_adapters
from weft.engine.model.spec import base_shape, read_spec

SMALL = ["--seconds", "1", "--span-s", "0.5", "--in-flight", "4", "--output-tokens", "4", "--set", "model.threads=1"]


def test_popularity_follows_zipfs_law() -> None:
    drawn = Counter(itertools.islice(zipf_adapters(50, seed=3), 50_000))
    whole = sum(1 / rank for rank in range(1, 51))
    for rank in (1, 2, 5, 20):
        assert drawn[rank - 1] == pytest.approx(50_000 / rank / whole, rel=0.1)
    assert max(drawn) == 49
    again = itertools.islice(zipf_adapters(50, seed=3), 100)
    assert list(again) == list(itertools.islice(zipf_adapters(50, seed=3), 100))


def test_small_adapters_are_for_the_shape_and_made_once(tmp_path: Path) -> None:
    folders = sorted(make_small_adapters(tmp_path).iterdir())
    assert len(folders) == NUM_SMALL
    base_config().save_pretrained(tmp_path / "base")
    shape = base_shape(read_spec(tmp_path / "base"), "")
    for folder in folders:
        weights = folder / "adapter_model.safetensors"
        checkpoint = read_checkpoint((folder / "adapter_config.json").read_bytes(), weights, shape, 64)
        assert set(checkpoint.ranks.values()) == {8}
        assert checkpoint.applied == 48
    before = [(folder / "adapter_model.safetensors").stat().st_mtime_ns for folder in folders]
    make_small_adapters(tmp_path)
    assert [(folder / "adapter_model.safetensors").stat().st_mtime_ns for folder in folders] == before


@pytest.mark.slow
@pytest.mark.timeout(900)  # a server starts seven times
def test_a_small_run_weighs_cold_and_warm_against_the_control(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert (
        main("adapters-http", ["--counts", "4", "--tight", "6", *SMALL, "--cache", str(tmp_path), "--json", str(path)])
        == 0
    )
    result: dict[str, Any] = json.loads(path.read_text())
    assert set(result["arms"]) == {"4", "tight"}
    few = result["arms"]["4"]["runs"]
    assert few["served"]["cold"]["states"]["stored"] > 0
    assert few["control"]["cold"]["states"] == few["control"]["warm"]["states"] == {"device": 1.0}
    tight = result["arms"]["tight"]
    assert tight["settings"]["served"][0].startswith("memory.gib=0.0")
    assert tight["runs"]["served"]["cold"]["states"].get("device", 0.0) < 1
    for arm in result["arms"].values():
        cold = arm["runs"]["served"]["cold"]["tokens_per_s"]["median"]
        control = arm["runs"]["control"]["cold"]["tokens_per_s"]["median"]
        assert arm["ratio"]["cold"]["median"] == pytest.approx(cold / control, rel=1e-3)


@pytest.mark.slow
def test_a_control_without_room_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--counts", "4", "--tight", "0", *SMALL, "--cache", str(tmp_path), "--set", "adapter.slots=2"]
    assert main("adapters-http", arguments) == 1
    assert "The control needs all 4 adapters on the device" in capsys.readouterr().err

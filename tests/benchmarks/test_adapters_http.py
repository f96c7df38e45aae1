"""Many adapters over HTTP: the requests that it sends, and a small run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.benchmarks.main import main
from manylora.benchmarks.qwen_shape import NUM_SMALL, base_config, make_small_adapters
from manylora.engine.model.spec import base_shape, read_spec

SMALL = "--seconds 1 --span-s 0.5 --in-flight 4 --output-tokens 4 --set model.threads=1"


def test_small_adapters_are_for_the_shape_and_made_once(tmp_path: Path) -> None:
    folders = sorted(make_small_adapters(tmp_path).iterdir())
    assert len(folders) == NUM_SMALL
    base_config().save_pretrained(tmp_path / "base")
    shape = base_shape(read_spec(tmp_path / "base"), "")
    for folder in folders:
        weights = folder / "adapter_model.safetensors"
        checkpoint = read_checkpoint(
            (folder / "adapter_config.json").read_bytes(), weights, shape, 64
        )
        assert set(checkpoint.ranks.values()) == {8}
        assert checkpoint.applied == 48
    before = [(folder / "adapter_model.safetensors").stat().st_mtime_ns for folder in folders]
    make_small_adapters(tmp_path)
    assert [
        (folder / "adapter_model.safetensors").stat().st_mtime_ns for folder in folders
    ] == before


@pytest.mark.slow
def test_a_small_run_weighs_cold_and_warm_against_the_control(
    measure: Callable[..., dict[str, Any]],
) -> None:
    arm = measure("adapters-http", f"--counts= --tight 6 {SMALL}")["arms"]["tight"]
    assert arm["settings"]["served"][0].startswith("memory.gib=0.0")
    served, control = arm["runs"]["served"], arm["runs"]["control"]
    assert served["cold"]["states"]["stored"] > 0
    assert served["cold"]["states"].get("device", 0.0) < 1
    assert control["cold"]["states"] == control["warm"]["states"] == {"device": 1.0}
    for span in ("cold", "warm"):
        expected = served[span]["tokens_per_s"]["median"] / control[span]["tokens_per_s"]["median"]
        assert arm["ratio"][span]["median"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_a_control_without_room_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--counts 6 --tight 0 {SMALL} --set adapter.slots=2".split()
    assert main("adapters-http", arguments) == 1
    assert "The control needs all 6 adapters on the device" in capsys.readouterr().err

"""The promise about wasted page bytes, on shapes that the engine reads from configs of real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from real_models import real_config
from weft.adapters.base_shape import MODULE_PATHS
from weft.benchmarks.model_shapes import ALL_LINEAR, MODELS, QUERY_AND_VALUE, ModelShape
from weft.benchmarks.pool.page_waste import KINDS, waste_of
from weft.engine.model.spec import base_shape, read_spec

MAX_WASTE = 0.05
"""Of adapters on all linear layers, from rank 16 on."""
MAX_SMALL_WASTE = 0.20
"""Of adapters of rank 8 on queries and values alone."""
QWEN_SMALL_WASTE = 0.3125
"""2 pages are the least that hold 1,056 KiB of rows when a page is 64 tokens of KV cache, 768 KiB."""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_shapes_are_what_the_engine_reads_from_a_config(model: ModelShape, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(real_config(model.name)))
    spec = read_spec(tmp_path)
    assert base_shape(spec, "") == model.base()
    assert (spec.num_kv_heads, spec.head_dim) == (model.num_kv_heads, model.head_dim)
    assert len(model.base().modules) == len(MODULE_PATHS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
def test_adapters_of_all_linear_layers_waste_at_most_five_percent(model: ModelShape, rank: int) -> None:
    assert (ALL_LINEAR, rank) in KINDS
    assert 0 <= waste_of(model, ALL_LINEAR, rank)["waste"] <= MAX_WASTE


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_small_adapters_waste_at_most_a_fifth_or_fill_the_least_pages(model: ModelShape) -> None:
    found = waste_of(model, QUERY_AND_VALUE, 8)
    limit = QWEN_SMALL_WASTE if model.name == "Qwen2.5-0.5B" else MAX_SMALL_WASTE
    assert found["waste"] <= limit
    assert found["pages"] == found["least_pages"]


def test_the_command_prints_the_table_and_writes_the_figures(
    measure: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure("waste", "")
    printed = capsys.readouterr().out
    assert "all linear, rank 128" in printed
    assert len(result["adapters"]) == len(MODELS) * len(KINDS)
    assert json.loads(printed.splitlines()[-1])["adapters"] == result["adapters"]

"""The decoder computes what transformers does, however a step is cut and mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from manylora.engine.model.spec import read_spec
from manylora.memory.geometry import PageGeometry
from step_driver import StepDriver
from tiny_models import (
    ALL_LINEAR,
    load_reference,
    make_adapter,
    make_model,
    prompt,
    reference_logits,
    with_head_alone,
    with_own_head,
)

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-sharded": ("llama", {"tied": True, "sharded": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-sharded": ("qwen3", {"tied": True, "sharded": True}),
}
MakeVariant = Callable[[str], Path]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> MakeVariant:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            architecture, fields = VARIANTS[name]
            made[name] = make_model(tmp_path_factory.mktemp(name), architecture, **fields)
        return made[name]

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, variant: MakeVariant) -> None:
    tokens = prompt(41)
    folder = variant(name)
    assert_same(
        StepDriver(folder).logits_alone(tokens), reference_logits(load_reference(folder), tokens)
    )


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-tied-sharded"])
def test_a_head_beside_a_tied_embedding_is_used_as_transformers_does(
    name: str, tmp_path: Path
) -> None:
    architecture, fields = VARIANTS[name]
    tokens, folder = prompt(17), make_model(tmp_path, architecture, **fields)
    tied = StepDriver(folder).logits_alone(tokens)
    with_own_head(folder)
    own = StepDriver(folder).logits_alone(tokens)
    assert_same(own, reference_logits(load_reference(folder), tokens))
    assert (own - tied).abs().max() > 0.1


@pytest.mark.parametrize("change", [with_own_head, with_head_alone])
def test_an_adapter_on_a_base_with_an_unusual_head_does_what_peft_does(
    tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    folder = change(make_model(tmp_path / "base", "qwen2", tied=True))
    adapter = make_adapter(folder, tmp_path / "adapter", rank=4, alpha=8, targets=ALL_LINEAR)
    tokens, driver = prompt(17), StepDriver(folder)
    found = driver.logits_alone(tokens, driver.load_adapter(adapter))
    reference = PeftModel.from_pretrained(load_reference(folder), str(adapter)).eval()
    assert_same(found, reference_logits(reference, tokens))
    assert (found - driver.logits_alone(tokens)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-tied-sharded"])
def test_a_tied_head_without_the_embedding_is_both_as_transformers_has_it(
    name: str, tmp_path: Path
) -> None:
    architecture, fields = VARIANTS[name]
    tokens, folder = prompt(17), make_model(tmp_path, architecture, **fields)
    tied = StepDriver(folder).logits_alone(tokens)
    with_head_alone(folder)
    assert read_spec(folder).is_tied
    assert torch.equal(StepDriver(folder).logits_alone(tokens), tied)
    assert_same(tied, reference_logits(load_reference(folder), tokens))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 17])
def test_a_prompt_in_chunks_equals_the_whole_prompt(
    name: str, chunk_tokens: int, variant: MakeVariant
) -> None:
    tokens = prompt(41, seed=1)
    driver = StepDriver(variant(name))
    whole = driver.logits_alone(tokens)
    request = driver.request(tokens)
    parts = []
    while request.num_computed < len(tokens):
        parts += driver.logits([request], min(chunk_tokens, len(tokens) - request.num_computed))
    assert_same(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2"])
def test_a_mixed_batch_equals_each_request_alone(name: str, variant: MakeVariant) -> None:
    driver = StepDriver(variant(name))
    prompts = [prompt(length, seed=length) for length in (3, 40, 1, 17, 25)]
    alone = [driver.logits_alone(tokens) for tokens in prompts]
    requests = [driver.request(tokens) for tokens in prompts]
    driver.logits(requests[1:2], 30)
    driver.logits(requests[4:], 24)
    mixed = driver.logits(requests)
    assert_same(mixed[0], alone[0])
    assert_same(mixed[1], alone[1][30:])
    assert_same(mixed[2], alone[2])
    assert_same(mixed[3], alone[3])
    assert_same(mixed[4], alone[4][24:])


def test_layers_in_several_groups_equal_layers_in_one(variant: MakeVariant) -> None:
    folder, tokens = variant("llama"), prompt(41, seed=2)
    whole = StepDriver(folder).logits_alone(tokens)
    geometry = PageGeometry(
        page_bytes=2 * 2 * 2 * 16 * 16 * 4,
        page_tokens=16,
        num_groups=2,
        layers_per_group=2,
        num_layers=3,
        num_kv_heads=2,
        head_dim=16,
        dtype_bytes=4,
    )
    driver = StepDriver(folder, geometry=geometry)
    request = driver.request(tokens)
    parts = driver.logits([request], 20) + driver.logits([request])
    assert len(request.table.pages) == 2
    assert_same(torch.cat(parts), whole)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", dtype=torch.bfloat16)
    tokens = prompt(30)
    expected = reference_logits(load_reference(folder), tokens)
    actual = StepDriver(folder, dtype=torch.bfloat16).logits_alone(tokens)
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().mean() < 0.02 * expected.abs().mean()

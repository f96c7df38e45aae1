"""A model with keys and values in 8 bits: against transformers with a cache that rounds them, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from manylora.engine.sampling_params import SamplingParams
from manylora.kernels.native.library import native_library
from oracles import int8_vector
from step_driver import StepDriver
from tiny_models import ALL_LINEAR, load_reference, make_adapter, make_model, prompt

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen3": ("qwen3", {}),
}
MakeVariant = Callable[[str], Path]


class RoundingCache(DynamicCache):
    """Keeps what is left of keys and values after they were stored in 8 bits."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> Any:
        return super().update(rounded(key_states), rounded(value_states), *arguments, **named)


def rounded(x: torch.Tensor) -> torch.Tensor:
    vectors = []
    for vector in x.reshape(-1, x.shape[-1]).tolist():
        stored, scale = int8_vector(vector)
        vectors.append([each * scale for each in stored])
    return torch.tensor(vectors).view(x.shape)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


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
@torch.inference_mode()
def test_logits_equal_those_of_transformers_over_a_cache_that_rounds(
    name: str, variant: MakeVariant
) -> None:
    tokens = prompt(70)
    reference = load_reference(variant(name))
    plain, expected = (
        reference(torch.tensor([tokens]), cache=kind(config=reference.config)).logits[0]
        for kind in (DynamicCache, RoundingCache)
    )
    found = StepDriver(variant(name), is_kv_int8=True).logits_alone(tokens)
    # A number that lies at the border of two steps may be rounded to the other one.
    assert relative_error(found, expected) < 1e-3
    assert 5e-3 < relative_error(expected, plain) < 5e-2


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunk_tokens", [1, 17, 64])
def test_a_prompt_in_chunks_beside_others_equals_the_whole_prompt(
    name: str, chunk_tokens: int, variant: MakeVariant
) -> None:
    tokens = prompt(150, seed=1)
    driver = StepDriver(variant(name), is_kv_int8=True)
    whole = driver.logits_alone(tokens)
    request, parts = driver.request(tokens), []
    while request.num_computed < len(tokens):
        count = min(chunk_tokens, len(tokens) - request.num_computed)
        parts.append(driver.logits([driver.request(prompt(5)), request], count)[1])
    found = torch.cat(parts)
    if native_library() is None:
        assert relative_error(found, whole) < 1e-2
    else:
        assert torch.equal(found, whole)


def test_layers_in_several_groups_equal_layers_in_one(variant: MakeVariant) -> None:
    """As in models whose keys and values of 16 tokens exceed a page."""
    tokens = prompt(150, seed=2)
    one = StepDriver(variant("llama"), is_kv_int8=True)
    halved = replace(one.geometry, num_groups=2, layers_per_group=2)
    several = StepDriver(variant("llama"), geometry=halved)
    torch.testing.assert_close(
        several.logits_alone(tokens), one.logits_alone(tokens), rtol=0, atol=0
    )


def test_an_adapter_that_overflows_ends_its_own_chunk_only(
    variant: MakeVariant, tmp_path: Path
) -> None:
    """Its keys and values are not finite, and no number in 8 bits can say so but their scale."""
    driver = StepDriver(variant("llama"), is_kv_int8=True)
    wild = driver.load_adapter(make_adapter(variant("llama"), tmp_path, targets=ALL_LINEAR))
    tokens = prompt(6)
    alone = driver.run([driver.request(tokens, params=SamplingParams())])[0].token_id
    driver.tables.host_scalings[wild.slot] = 1e38
    requests = [driver.request(tokens, each, params=SamplingParams()) for each in (wild, None)]
    spoilt, sound = driver.run(requests)
    assert (spoilt.is_non_finite, spoilt.token_id) == (True, None)
    assert (sound.is_non_finite, sound.token_id) == (False, alone)


def test_a_read_of_freed_memory_shows(variant: MakeVariant) -> None:
    driver = StepDriver(variant("llama"), is_kv_int8=True)
    request = driver.request(prompt(20))
    assert driver.run([request])[0].token_id is not None
    driver.arena.poison(request.table.by_block())
    (result,) = driver.run([request])
    assert (result.is_non_finite, result.token_id) == (True, None)

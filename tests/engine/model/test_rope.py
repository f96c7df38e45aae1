"""Rotary tables equal those of transformers, for every kind that is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from manylora.engine.model.rope import rope_table
from manylora.engine.model.spec import decoder_spec
from numerics import assert_close

NUM_POSITIONS = 200
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, **LLAMA3},
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "attention_factor": 1.5,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 8.0,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_tables_equal_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters=dict(parameters),
    )
    reference: Any = LlamaRotaryEmbedding(config)
    cos, sin = reference(torch.zeros(1), torch.arange(NUM_POSITIONS)[None])
    spec = decoder_spec(config.to_dict())
    table = rope_table(spec.rope, spec.head_dim, NUM_POSITIONS, torch.device("cpu"))
    assert_close(table[0], cos[0, :, : spec.head_dim // 2])
    assert_close(table[1], sin[0, :, : spec.head_dim // 2])

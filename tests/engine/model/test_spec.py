"""Configs become specs, and what a spec cannot say is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from manylora.adapters.base_shape import SITES
from manylora.engine.model.spec import base_shape, decoder_spec, read_spec
from manylora.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def test_sizes_and_defaults_are_those_of_the_config() -> None:
    spec = decoder_spec(LLAMA)
    assert (spec.head_dim, spec.q_features, spec.kv_features) == (16, 64, 32)
    assert spec.norm_eps == 1e-5
    assert spec.rope.theta == 10_000
    assert [spec.is_tied, spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm] == [False] * 5
    assert spec.sliding_windows == (None, None, None)


def test_heads_of_keys_default_to_the_heads_of_queries() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert decoder_spec(config).num_kv_heads == 4


def test_the_parts_of_each_architecture_are_told_apart() -> None:
    assert decoder_spec(QWEN2).qkv_bias
    assert not decoder_spec(QWEN2).o_bias
    assert decoder_spec(QWEN3).qk_norm
    assert decoder_spec(QWEN3).head_dim == 128
    assert decoder_spec({**QWEN3, "attention_bias": True}).o_bias
    assert decoder_spec({**LLAMA, "mlp_bias": True}).mlp_bias


def test_sliding_windows_follow_the_layers() -> None:
    sliding = {**QWEN2, "use_sliding_window": True, "sliding_window": 8}
    assert decoder_spec(MISTRAL).sliding_windows == (4096,) * 3
    assert decoder_spec({**MISTRAL, "sliding_window": None}).sliding_windows == (None,) * 3
    assert decoder_spec({**QWEN2, "sliding_window": 8}).sliding_windows == (None,) * 3
    assert decoder_spec({**sliding, "max_window_layers": 1}).sliding_windows == (None, 8, 8)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert decoder_spec({**sliding, "layer_types": kinds}).sliding_windows == (8, None, None)


def test_both_spellings_of_the_rotary_embedding_are_read() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    older = decoder_spec({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}).rope
    newer = decoder_spec({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}}).rope
    assert older == newer
    assert older.theta == 5e5
    assert older.original_positions == 64


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    config = {
        **LLAMA,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    }
    assert decoder_spec(config).max_positions == 2048


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, "model_type"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": 4}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
            "rope_parameters.mrope_section",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters.full_attention",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decoder_spec({**LLAMA, **changes})
    assert caught.value.param == key
    assert key in caught.value.message


def test_keys_that_are_switched_off_or_without_effect_pass() -> None:
    extra = {
        "use_mrope": False,
        "logit_scale": None,
        "unsloth_version": "1",
        "_name_or_path": "x",
        "pretraining_tp": 2,
    }
    assert decoder_spec({**LLAMA, **extra}) == decoder_spec(LLAMA)


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (QWEN2, {"attention_bias": True}, "attention_bias"),
        (
            QWEN2,
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layer_types",
        ),
        (
            QWEN2,
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types",
        ),
    ],
)
def test_what_an_architecture_lacks_is_refused(
    config: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        decoder_spec({**config, **changes})


def test_the_shape_for_adapters_has_every_module_with_its_sizes() -> None:
    base = base_shape(decoder_spec({**LLAMA, "head_dim": 24}), "sha256:" + "0" * 64)
    sizes = {module.name: (module.in_features, module.out_features) for module in base.modules}
    assert sizes["q_proj"] == (64, 96)
    assert sizes["v_proj"] == (64, 48)
    assert sizes["o_proj"] == (96, 64)
    assert sizes["down_proj"] == (112, 64)
    assert [sum(base.site_widths(index)) for index in range(len(SITES))] == [192, 64, 224, 64]


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            "{",
            "[" * 100_000,
            '"' + "x" * (1 << 20) + '"',
            '{"a": 1, "a": 1}',
            "\ufeff{}",
            "{}x",
        ),
        *(json.dumps({**LLAMA, "rms_norm_eps": value}) for value in (math.nan, math.inf, "\ud800")),
        json.dumps(LLAMA).replace("1e-05", "1e999"),
    ],
)
def test_a_broken_config_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json|rms_norm_eps"):
        read_spec(tmp_path)


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_written_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_spec(tmp_path) == decoder_spec(LLAMA)

"""What the config.json of real models says, as far as Manylora reads it."""

from __future__ import annotations

from typing import Any

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_SIZES = {
    "Llama-3-8B": ("LlamaForCausalLM", (4096, 14336, 32, 32, 8), 128256),
    "Qwen2.5-0.5B": ("Qwen2ForCausalLM", (896, 4864, 24, 14, 2), 151936),
    "Llama-2-7B": ("LlamaForCausalLM", (4096, 11008, 32, 32, 32), 32000),
}


def real_config(name: str) -> dict[str, Any]:
    """The fields of one model."""
    architecture, sizes, vocab_size = _SIZES[name]
    return {
        **dict(zip(_FIELDS, sizes, strict=True)),
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "tie_word_embeddings": architecture == "Qwen2ForCausalLM",
    }

"""Writes a checkpoint as a GGUF file as llama.cpp's convert_hf_to_gguf.py does it, with a name table of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from quantised_models import WEIGHTS

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
Blocks = Callable[[tuple[int, int], np.random.Generator], tuple[np.ndarray, np.ndarray]]
"""Random blocks for a weight of a shape, as bytes, and its values in float32."""


def write_gguf(
    source: Path,
    path: Path,
    kinds: Mapping[str, Type],
    *,
    blocks: Blocks | None = None,
    fields: Mapping[str, Any] | None = None,
    factors: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """Write the model in `source` to `path`.

    Args:
        source: A checkpoint in float32.
        path: The file.
        kinds: Type by end of the name in the file, as `attn_q.weight`; others are F32 where they have one extent, and
            of the kind at `""` where they have two.
        blocks: Makes random weights in place of those of the source, for the kind at `""`.
        fields: Further metadata of the architecture.
        factors: Rotary factors of a Llama 3.

    Returns:
        All tensors as the file stores them, in float32, in the layout and with the names of `source`.
    """
    config = json.loads((source / "config.json").read_text())
    arch, decoded, generator = config["model_type"], {}, np.random.default_rng(7)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, arch)
    _write_config(writer, config, fields or {})
    _write_tokenizer(writer, source)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, tensor in load_file(source / WEIGHTS).items():
        stem, _, end = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        place = stem if layer is None else stem.split(".", 3)[3]
        stored = f"{NAMES[place]}.{end}" if layer is None else f"blk.{layer}.{NAMES[place]}.{end}"
        heads = {
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        }.get(place)
        is_permuted = arch == "llama" and heads is not None
        values = tensor.float().numpy()
        if is_permuted:
            values = _permute(values, config[heads])
        kind = kinds.get(
            stored.split(".", 2)[-1], Type.F32 if values.ndim == 1 else kinds.get("", Type.F32)
        )
        if blocks and kind == kinds.get("") and values.ndim == 2:
            packed, values = blocks(values.shape, generator)
        else:
            packed = quantize(values, kind)
            values = dequantize(packed, kind)
        writer.add_tensor(stored, packed, raw_dtype=kind)
        decoded[name] = torch.from_numpy(
            _unpermute(values, config[heads]) if is_permuted else np.array(values)
        )
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    return decoded


def _permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py: neighbours are rotated, not halves."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row: pair i of a head is of rows 2i and 2i + 1, and was of rows i and half + i."""
    size = values.shape[0] // num_heads
    undone = np.empty_like(values)
    for head in range(num_heads):
        for i in range(size // 2):
            undone[head * size + i] = values[head * size + 2 * i]
            undone[head * size + size // 2 + i] = values[head * size + 2 * i + 1]
    return undone


def _write_config(writer: GGUFWriter, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for key, value in fields.items():
        adders: dict[type, Callable[..., None]] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        adders[type(value)](f"{config['model_type']}.{key}", value)


def _write_tokenizer(writer: GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **special}
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    tokens = {token_id: text for text, token_id in ids.items()}
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    if not merges:  # GGUF has no empty lists
        tokens[size - 1], merges = "Zq", ["Z q"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(size)])
    kinds = [TokenType.NORMAL if index in tokens else TokenType.UNUSED for index in range(size)]
    for index in special.values():
        kinds[index] = TokenType.CONTROL
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    writer.add_add_bos_token(
        str(settings.get("bos_token")) in json.dumps(tokenizer["post_processor"])
    )
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
    ):
        if settings.get(key) in ids:
            add(ids[settings[key]])
    template = source / "chat_template.jinja"
    writer.add_chat_template(
        template.read_text() if template.is_file() else settings["chat_template"]
    )


def q4_k(shape: tuple[int, int], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return _k_quant(shape, generator, has_fifth_bit=False)


def q5_k(shape: tuple[int, int], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return _k_quant(shape, generator, has_fifth_bit=True)


def _k_quant(
    shape: tuple[int, int], generator: np.random.Generator, *, has_fifth_bit: bool
) -> tuple[np.ndarray, np.ndarray]:
    """256 weights in 8 parts: d * scale * q - dmin * minimum, scales and minima in 6 bits."""
    packed, values = [], []
    for _ in range(shape[0] * shape[1] // 256):
        d, dmin = (
            np.float16(generator.uniform(1e-4, 2e-4)),
            np.float16(generator.uniform(1e-3, 2e-3)),
        )
        scale, minimum = generator.integers(0, 64, 8), generator.integers(0, 64, 8)
        q = generator.integers(0, 32 if has_fifth_bit else 16, (8, 32))
        six_bits = np.zeros(12, np.uint8)
        for j in range(4):
            six_bits[j] = scale[j] | (scale[j + 4] >> 4) << 6
            six_bits[j + 4] = minimum[j] | (minimum[j + 4] >> 4) << 6
            six_bits[j + 8] = (scale[j + 4] & 15) | (minimum[j + 4] & 15) << 4
        fifth = sum((q[j] >> 4 & 1) << j for j in range(8)).astype(np.uint8)
        low = np.concatenate([(q[2 * r] & 15) | (q[2 * r + 1] & 15) << 4 for r in range(4)]).astype(
            np.uint8
        )
        head = np.array([d, dmin]).view(np.uint8)
        packed.append(np.concatenate([head, six_bits, *([fifth] if has_fifth_bit else []), low]))
        values.append(
            (np.float32(d) * scale[:, None] * q - np.float32(dmin) * minimum[:, None]).flatten()
        )
    return np.stack(packed).reshape(shape[0], -1), np.stack(values).astype(np.float32).reshape(
        shape
    )


def q6_k(shape: tuple[int, int], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """256 weights in 16 parts: d * scale * (q - 32), scales in 8 bits."""
    packed, values = [], []
    for _ in range(shape[0] * shape[1] // 256):
        d, scale = np.float16(generator.uniform(2e-5, 5e-5)), generator.integers(-128, 128, 16)
        q = generator.integers(0, 64, 256)
        low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
        for half in range(2):
            quarters = q[half * 128 :][:128].reshape(4, 32)
            low[half * 64 :][:32] = (quarters[0] & 15) | (quarters[2] & 15) << 4
            low[half * 64 + 32 :][:32] = (quarters[1] & 15) | (quarters[3] & 15) << 4
            high[half * 32 :][:32] = sum((quarters[k] >> 4) << 2 * k for k in range(4))
        packed.append(
            np.concatenate(
                [low, high, scale.astype(np.int8).view(np.uint8), np.array([d]).view(np.uint8)]
            )
        )
        values.append(np.float32(d) * np.repeat(scale, 16) * (q - 32))
    return np.stack(packed).reshape(shape[0], -1), np.stack(values).astype(np.float32).reshape(
        shape
    )

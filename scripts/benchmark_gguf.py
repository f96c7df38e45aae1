"""Write the base of the benchmarks as a GGUF file in bfloat16, for llama.cpp. usage: benchmark_gguf.py FILE.

Its tokens are words without a meaning: loads send ids. Other formats come from `llama-quantize FILE OTHER Q8_0`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from safetensors.torch import load_file

from manylora.benchmarks.qwen_shape import VOCAB_SIZE, base_config, make_checkpoints

PAD = 0
EOS = 1


def main(target: Path) -> None:
    """Write the file; makes the checkpoint if it is not there."""
    base, _ = make_checkpoints()
    config: Any = base_config()
    writer = GGUFWriter(target, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<pad>", "<eos>", *(f"w{index}" for index in range(2, VOCAB_SIZE))])
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (VOCAB_SIZE - 2))
    writer.add_bos_token_id(PAD)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(PAD)
    writer.add_add_bos_token(False)
    names = get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in load_file(base / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise SystemExit(f"GGUF has no name for {name}")
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.float().numpy())
        else:
            rows = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(stored, rows, raw_dtype=GGMLQuantizationType.BF16)
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

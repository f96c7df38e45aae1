"""Canary adapters: adapter k makes token k the most likely one everywhere, whatever the prompt.

The base is a Qwen2 whose last layer has a large constant value bias, so attention there returns nearly the same vector
at every position. Rank row 0 of the last o_proj reads that constant; its B column points along row k of a head with
unit rows. The other modules carry small noise, so that an adapter covers all linear layers and fills several pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB = 256
PULL = 200.0
MODULES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}


def make_canary_base(folder: Path) -> torch.Tensor:
    """Save the base; returns its head, [VOCAB, 64], with unit rows."""
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.bias.copy_(torch.randn(32))
        head = torch.nn.functional.normalize(torch.randn(VOCAB, 64), dim=1)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    return head


def value_direction(folder: Path) -> torch.Tensor:
    """What the last layer's attention returns at every position, [64], nearly."""
    model: Any = Qwen2ForCausalLM.from_pretrained(folder)
    bias: torch.Tensor = model.model.layers[1].self_attn.v_proj.bias.detach()
    return bias.view(2, 1, 16).expand(2, 2, 16).reshape(64)


def make_canary(
    folder: Path, token: int, rank: int, head: torch.Tensor, constant: torch.Tensor
) -> None:
    """Save an adapter that forces `token`."""
    generator = torch.Generator().manual_seed(token)
    tensors = {}
    for layer in range(2):
        for path, (width_in, width_out) in MODULES.items():
            lora_a = torch.randn(rank, width_in, generator=generator) * 1e-2
            lora_b = torch.randn(width_out, rank, generator=generator) * 1e-2
            if layer == 1 and path == "self_attn.o_proj":
                lora_a.zero_()
                lora_b.zero_()
                lora_a[0] = constant / constant.square().sum()
                lora_b[:, 0] = PULL * head[token]
            name = f"base_model.model.model.layers.{layer}.{path}"
            tensors[f"{name}.lora_A.weight"] = lora_a
            tensors[f"{name}.lora_B.weight"] = lora_b
    folder.mkdir(parents=True)
    names = sorted({path.rsplit(".", 1)[1] for path in MODULES})
    LoraConfig(
        r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM"
    ).save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")

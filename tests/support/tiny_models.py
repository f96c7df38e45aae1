"""Makers of tiny random checkpoints: base models with transformers, adapters with PEFT, a tokenizer built in code.

Everything is seeded and needs no download. Every weight is random, also the norms and biases that transformers
initialises to ones and zeros, so that a forgotten one shows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from manylora.engine.model.weight_files import EMBEDDING, HEAD

disable_progress_bar()  # type: ignore[no-untyped-call]

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TINY_VOCAB_SIZE = 320
"""The 256 bytes, the special tokens, and unused ids up to here."""

_CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}
"""Of the config, of the model, and the config's fields that only this architecture has."""
ARCHITECTURES = tuple(_CLASSES)
_SHAPE = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "attn_implementation": "eager",
}
_SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    tied: bool = False,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    **config_fields: Any,
) -> Path:
    """Write a tiny random checkpoint with its tokenizer into `folder`, and return `folder`.

    Args:
        folder: Where to; made if missing.
        architecture: One of `ARCHITECTURES`.
        seed: Of the weights.
        tied: Whether the head is the embedding table.
        sharded: Whether the weights are split into several files with an index.
        dtype: Of the saved weights.
        config_fields: Override fields of the config, for example `sliding_window=8`.
    """
    config_class, model_class, own_fields = _CLASSES[architecture]
    fields = {**_SHAPE, **own_fields, "tie_word_embeddings": tied, **copy.deepcopy(config_fields)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**fields))
        _randomise(model)
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB" if sharded else "5GB")
    make_tokenizer(folder)
    return folder


def with_own_head(folder: Path) -> Path:
    """Add a head to a tied checkpoint and leave its config, as merging an adapter with trained embeddings does."""
    head = torch.randn(TINY_VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(7)) / 8
    index = folder / "model.safetensors.index.json"
    file = folder / ("own_head.safetensors" if index.is_file() else "model.safetensors")
    tensors = load_file(file) if file.is_file() else {}
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.weight"] = file.name
        index.write_text(json.dumps(content))
    return folder


def with_head_alone(folder: Path) -> Path:
    """Store the embedding of a tied checkpoint under the head's name."""
    (file,) = (file for file in folder.glob("*.safetensors") if EMBEDDING in load_file(file))
    tensors = load_file(file)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save_file(tensors, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(index.read_text().replace(EMBEDDING, HEAD))
    return folder


def make_adapter(
    model_folder: Path,
    folder: Path,
    *,
    rank: int = 8,
    alpha: int = 16,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    seed: int = 1,
    **lora_fields: Any,
) -> Path:
    """Write a random PEFT adapter for the model in `model_folder` into `folder`, and return `folder`.

    `lora_fields` are further fields of PEFT's LoraConfig: `use_rslora`, `rank_pattern`, `layers_to_transform`, ...
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **lora_fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(load_reference(model_folder), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15)
    model.peft_config["default"].base_model_name_or_path = "tiny"
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def load_reference(folder: Path) -> Any:
    """The checkpoint as transformers loads it, in float32, eager attention, ready for inference."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return (
        _CLASSES[model_type][1]
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens of the tiny vocabulary."""
    return torch.randint(
        0, TINY_VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def reference_logits(
    model: Any, token_ids: Sequence[int], adapter: Path | None = None
) -> torch.Tensor:
    """What a model of transformers computes, [len(token_ids), vocab_size]; with an adapter, PEFT changes the model."""
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.inference_mode():
        scores: torch.Tensor = model.eval()(torch.tensor([token_ids])).logits[0]
    return scores


def make_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer with special tokens and a chat template into `folder`, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos, pad, *rest = _SPECIAL_TOKENS
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(
        tokenizer_object=_byte_level_tokenizer(),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=rest,
        chat_template=_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return folder


@cache
def _byte_level_tokenizer() -> Tokenizer:
    """Ids 0 to 255 stand for the bytes in the order of the byte-level alphabet; the special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return tokenizer


def _randomise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.15)

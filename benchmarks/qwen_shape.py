"""The model of the CPU comparison: Qwen2-0.5B's shape with a vocabulary of 32,000, random weights, and random adapters.

Made by transformers and PEFT with a seed, once, in a cache folder outside the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from weft.benchmarks.model_shapes import MODELS, QUERY_AND_VALUE
from weft.benchmarks.stored import random_lora

VOCAB_SIZE = 32_000
MODEL_ABOUT = "Qwen2-0.5B shape, vocabulary 32000, random weights, bfloat16"
RANKS = (8, 16, 32, 64, 8, 16, 32, 64)
"""One adapter each, on all linear layers."""
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_SMALL = 8
SMALL_RANK = 8
_SEED = 7
_FORMAT = 1
"""Counts up whenever the files would come out differently."""


def make_checkpoints(cache: Path) -> tuple[Path, list[Path]]:
    """Folders of the base and of each adapter; made if they are not there (a minute, 1.1 GB)."""
    root = cache / f"qwen2-0.5b-shape-{_FORMAT}"
    base = root / "base"
    adapters = [root / f"adapter-{index}-rank-{rank}" for index, rank in enumerate(RANKS)]
    finished = root / "finished"
    if not finished.exists():
        root.mkdir(parents=True, exist_ok=True)
        model = _save_base(base)
        for index, folder in enumerate(adapters):
            model = _save_adapter(model, folder, index)
        finished.touch()
    return base, adapters


def make_small_adapters(cache: Path) -> Path:
    """Folder of folders of adapters of rank 8 on q and v, a megabyte each: thousands can be stored. Made if need be."""
    root = cache / f"qwen2-0.5b-shape-{_FORMAT}" / "small"
    base = next(model for model in MODELS if model.name == "Qwen2.5-0.5B").base()
    targets = ["q_proj", "v_proj"]
    generator = torch.Generator().manual_seed(_SEED)
    for folder in (root / f"small-{index}" for index in range(NUM_SMALL)):
        tensors = random_lora(base, QUERY_AND_VALUE, SMALL_RANK, generator)
        if not (folder / "adapter_model.safetensors").exists():
            small = LoraConfig(r=SMALL_RANK, lora_alpha=2 * SMALL_RANK, target_modules=targets, task_type="CAUSAL_LM")
            small.save_pretrained(str(folder))
            save_file(tensors, folder / "adapter_model.safetensors")
    return root


def base_config() -> Qwen2Config:
    """386M parameters, 24 layers, hidden size 896, tied embeddings."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def _save_base(folder: Path) -> Any:  # noqa: ANN401 - transformers is untyped in places
    torch.manual_seed(_SEED)
    model: Any = Qwen2ForCausalLM(base_config())
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return model


def _save_adapter(model: Any, folder: Path, index: int) -> Any:  # noqa: ANN401
    torch.manual_seed(_SEED + 1 + index)
    rank = RANKS[index]
    model.name_or_path = "qwen2-0.5b-shape"
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL_LINEAR, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    return adapted.unload()

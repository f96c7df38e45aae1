"""The model of the CPU comparison: Qwen2-0.5B's shape with a vocabulary of 32,000, random weights, and random adapters.

Written by transformers and PEFT with a seed, once, in a cache folder outside the repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from manylora.adapters.base_shape import BaseShape
from manylora.benchmarks.model_shapes import ALL_LINEAR, QUERY_AND_VALUE, QWEN

CACHE = Path.home() / ".cache" / "manylora" / "benchmarks"
"""Folder of what benchmarks generate."""
VOCAB_SIZE = 32_000
MODEL_ABOUT = "Qwen2-0.5B shape, vocabulary 32000, random weights, bfloat16"
RANKS = (8, 16, 32, 64, 8, 16, 32, 64)
"""One adapter each, on all linear layers."""
NUM_SMALL = 8
SMALL_RANK = 8
_SEED = 7
MAX_POSITIONS = 8192
_FOLDER = "qwen2-0.5b-shape-3"
"""Folder in the cache; its number goes up whenever the generated files would differ."""


def make_checkpoints(cache: Path = CACHE) -> tuple[Path, list[Path]]:
    """Folders of the base and of each adapter; made if they are not there (a minute, 1.1 GB)."""
    root = cache / _FOLDER
    base = root / "base"
    adapters = [root / f"adapter-{index}-rank-{rank}" for index, rank in enumerate(RANKS)]
    finished = root / "finished"
    if not finished.exists():
        root.mkdir(parents=True, exist_ok=True)
        _save_base(base)
        for index, folder in enumerate(adapters):
            save_random_adapter(folder, QWEN.base(), ALL_LINEAR, RANKS[index], _SEED + 1 + index)
        finished.touch()
    return base, adapters


def make_small_adapters(cache: Path = CACHE) -> Path:
    """Folder of adapters of rank 8 on q and v, made if they are not there. Each is 1 MB: thousands can be stored."""
    root = cache / _FOLDER / "small"
    for index in range(NUM_SMALL):
        folder = root / f"small-{index}"
        if not (folder / "adapter_model.safetensors").exists():
            save_random_adapter(folder, QWEN.base(), QUERY_AND_VALUE, SMALL_RANK, _SEED + index)
    return root


def base_config() -> Qwen2Config:
    """386M parameters, 24 layers, hidden size 896, tied embeddings."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS}
    return Qwen2Config(**{**QWEN.config_fields(), **sizes})


def _save_base(folder: Path) -> None:
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


def save_random_adapter(
    folder: Path, base: BaseShape, modules: Sequence[int], rank: int, seed: int
) -> None:
    """Write an adapter for a base as PEFT does, with random weights in these modules of every layer."""
    targets = [base.modules[module].name for module in modules]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    config.save_pretrained(str(folder))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(base.num_layers):
        for module in (base.modules[index] for index in modules):
            path = f"base_model.model.{base.layer_prefix}.{layer}.{module.path}"
            for part, *sizes in (
                ("A", rank, module.in_features),
                ("B", module.out_features, rank),
            ):
                values = torch.randn(sizes, generator=generator).mul_(0.02)
                tensors[f"{path}.lora_{part}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")

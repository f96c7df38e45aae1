"""The models of the pool's benchmarks: Llamas small enough that thousands of requests take minutes, and their adapters.

Random weights, made with a seed, once, in a cache folder outside the repository. Adapters' weights are a few hundred
files in a blob store. Each file serves several adapters that differ in alpha: each is a version with its own digest and
its own host and device pages. Only the reads from disk are shared; the system caches these files anyway.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.lora.layout import adapter_pages
from manylora.adapters.ref import AdapterRef, LoraSpec
from manylora.benchmarks.engine.stored import adapter_ref, random_lora, store_blob
from manylora.benchmarks.model_shapes import ALL_LINEAR, ModelShape
from manylora.config import GIB, MemoryConfig
from manylora.memory.geometry import PageGeometry

VOCAB_SIZE = 512
RANKS = (64, 32, 16, 8)
"""Adapter i has rank `RANKS[i % 4]`; S-LoRA calls this mix S2."""
NUM_FILES = 256
"""Files of weights, a multiple of the number of ranks."""
DTYPE = torch.float32
"""The format that every CPU computes natively."""
_SEED = 11
_FORMAT = 1
"""Goes up whenever the generated files would differ."""


@dataclass(frozen=True, slots=True)
class PoolModel:
    """Sizes of a model, and the modules that its adapters change."""

    sizes: ModelShape
    about: str
    modules: tuple[int, ...]
    """Modules that adapters change, in every layer."""


GROUPED = PoolModel(
    ModelShape("grouped", num_layers=4, hidden=256, intermediate=512, num_heads=4, num_kv_heads=2),
    "Llama of 4 layers, hidden size 256, 2 of 4 KV heads; adapters on all linear layers; float32",
    ALL_LINEAR,
)
"""An adapter of the mean rank takes as many pages as 480 tokens, as for Llama-3-8B."""
ATTENTION = PoolModel(
    ModelShape(
        "attention", num_layers=4, hidden=128, intermediate=256, num_heads=4, num_kv_heads=4
    ),
    "Llama of 4 layers, hidden size 128, 4 of 4 KV heads; adapters on q, k, v and o; float32",
    (0, 1, 2, 3),
)
"""An adapter of the mean rank takes as many pages as 120 tokens, as for the models S-LoRA was measured with."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The generated checkpoint and adapters."""

    model: Path
    blobs: Path
    weights: tuple[str, ...]
    """Digests of the files of adapter weights."""
    kind: PoolModel

    @property
    def geometry(self) -> PageGeometry:
        """Pages of an arena for the model."""
        return self.kind.sizes.geometry(DTYPE.itemsize)

    def adapters(self, count: int) -> list[AdapterRef]:
        """Adapters 0 to `count - 1`."""
        return [self._adapter(index) for index in range(count)]

    def pages(self, rank: int) -> int:
        """Pages of an adapter of this rank."""
        layers = range(self.kind.sizes.num_layers)
        ranks = {(layer, module): rank for layer in layers for module in self.kind.modules}
        return adapter_pages(ranks, self.kind.sizes.base(), self.geometry)

    @property
    def mean_pages(self) -> float:
        """Pages of an adapter, over all ranks."""
        return sum(self.pages(rank) for rank in RANKS) / len(RANKS)

    def memory(
        self, num_pages: float, host_pages: float, *, prefix_cache: bool = True
    ) -> MemoryConfig:
        """Settings of an engine with so many device and host pages for requests and adapters."""
        gib, host_gib = (
            (int(pages) + 1.5) * self.geometry.page_bytes / GIB for pages in (num_pages, host_pages)
        )
        return MemoryConfig(gib=gib, host_gib=host_gib, prefix_cache=prefix_cache)

    def _adapter(self, index: int) -> AdapterRef:
        use, file = divmod(index, len(self.weights))
        rank = RANKS[index % len(RANKS)]
        return adapter_ref(
            f"adapter-{index}", LoraSpec(rank=rank, alpha=float(rank + use)), self.weights[file]
        )


def make_pool_shape(
    cache: Path, num_files: int = NUM_FILES, kind: PoolModel = GROUPED
) -> PoolShape:
    """The model and its adapters; made if they are not there (some seconds, 1 MB a file at most)."""
    root = cache / f"pool-shape-{_FORMAT}-{kind.sizes.name}-{num_files}"
    model, blobs, index = root / "model", root / "blobs", root / "weights.json"
    if not index.exists():
        root.mkdir(parents=True, exist_ok=True)
        _save_model(model, kind.sizes)
        generator, ranks = (
            torch.Generator().manual_seed(_SEED + 1),
            [RANKS[i % len(RANKS)] for i in range(num_files)],
        )
        files = (random_lora(kind.sizes.base(), kind.modules, rank, generator) for rank in ranks)
        index.write_text(
            json.dumps([store_blob(LocalBlobs(blobs), save(tensors)) for tensors in files])
        )
    return PoolShape(model, blobs, tuple(json.loads(index.read_text())), kind)


def _save_model(folder: Path, sizes: ModelShape) -> None:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(vocab_size=VOCAB_SIZE, **sizes.config_fields())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: Any = LlamaForCausalLM(config)
    model.to(DTYPE).save_pretrained(folder)

"""The models of the pool's benchmarks: Llamas small enough that thousands of requests take minutes, and their adapters.

Random weights, made with a seed, once, in a cache folder outside the repository. Adapters' weights are a few hundred
files in a blob store, and each file serves several adapters that differ in alpha: every adapter is a version of its
own, with its own digest, and has host and device pages of its own; only the reads from disk are shared, and those come
from the system's file cache in either case.
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

from weft.adapters.base_shape import MODULE_PATHS, BaseShape
from weft.adapters.blobs import LocalBlobs
from weft.adapters.layout import adapter_pages
from weft.adapters.ref import AdapterRef, LoraSpec, content_digest
from weft.engine.model.spec import base_shape, read_spec
from weft.memory.geometry import PageGeometry, page_geometry

VOCAB_SIZE = 512
RANKS = (64, 32, 16, 8)
"""Adapter i has rank `RANKS[i % 4]`; S-LoRA calls this mix S2."""
NUM_FILES = 256
"""Files of weights, a multiple of the number of ranks."""
DTYPE = torch.float32
"""What every CPU computes well."""
_SEED = 11
_FORMAT = 1
"""Counts up whenever the files would come out differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """Sizes of a model, and what its adapters change."""

    name: str
    about: str
    hidden: int
    intermediate: int
    num_kv_heads: int
    """Of 4 heads."""
    modules: tuple[int, ...]
    """What adapters change, in every layer."""


GROUPED = PoolModel(
    name="grouped",
    about="Llama of 4 layers, hidden size 256, 2 of 4 KV heads; adapters on all linear layers; float32",
    hidden=256,
    intermediate=512,
    num_kv_heads=2,
    modules=tuple(range(len(MODULE_PATHS))),
)
"""An adapter of the mean rank takes as many pages as 480 tokens, as for Llama-3-8B."""
ATTENTION = PoolModel(
    name="attention",
    about="Llama of 4 layers, hidden size 128, 4 of 4 KV heads; adapters on q, k, v and o; float32",
    hidden=128,
    intermediate=256,
    num_kv_heads=4,
    modules=(0, 1, 2, 3),
)
"""An adapter of the mean rank takes as many pages as 120 tokens, as for the models S-LoRA was measured with."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The checkpoint, the blobs, and what follows from them."""

    model: Path
    blobs: Path
    weights: tuple[str, ...]
    """Digests of the files of adapter weights."""
    base: BaseShape
    geometry: PageGeometry
    kind: PoolModel

    def adapters(self, count: int) -> list[AdapterRef]:
        """Adapters 0 to `count - 1`."""
        return [self._adapter(index) for index in range(count)]

    def pages(self, rank: int) -> int:
        """Pages of an adapter of this rank."""
        ranks = {(layer, module): rank for layer in range(self.base.num_layers) for module in self.kind.modules}
        return adapter_pages(ranks, self.base, self.geometry)

    @property
    def mean_pages(self) -> float:
        """Pages of an adapter, over all ranks."""
        return sum(self.pages(rank) for rank in RANKS) / len(RANKS)

    def gib(self, num_pages: float) -> float:
        """GiB of an arena or slab that has just so many pages to hand out."""
        return (int(num_pages) + 1.5) * self.geometry.page_bytes / (1 << 30)

    def _adapter(self, index: int) -> AdapterRef:
        use, file = divmod(index, len(self.weights))
        rank = RANKS[index % len(RANKS)]
        spec = LoraSpec(rank=rank, alpha=float(rank + use))
        return AdapterRef(
            tenant_id="benchmark",
            adapter_id=f"adapter-{index}",
            version=1,
            digest=content_digest(spec, self.weights[file]),
            weights_sha256=self.weights[file],
            config=spec,
        )


def make_pool_shape(cache: Path, num_files: int = NUM_FILES, kind: PoolModel = GROUPED) -> PoolShape:
    """The model and its adapters; made if they are not there (some seconds, 1 MB a file at most)."""
    root = cache / f"pool-shape-{_FORMAT}-{kind.name}-{num_files}"
    model, blobs, index = root / "model", root / "blobs", root / "weights.json"
    if not index.exists():
        root.mkdir(parents=True, exist_ok=True)
        _save_model(model, kind)
        digests = _save_weights(LocalBlobs(blobs), base_shape(read_spec(model), ""), kind, num_files)
        index.write_text(json.dumps(digests))
    spec = read_spec(model)
    base = base_shape(spec, "")
    geometry = page_geometry(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype_bytes=DTYPE.itemsize,
        largest_row_features=base.largest_row_features,
    )
    return PoolShape(model, blobs, tuple(json.loads(index.read_text())), base, geometry, kind)


def _save_model(folder: Path, kind: PoolModel) -> None:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=kind.hidden,
        intermediate_size=kind.intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kind.num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: Any = LlamaForCausalLM(config)
    model.to(DTYPE).save_pretrained(folder)


def _save_weights(blobs: LocalBlobs, base: BaseShape, kind: PoolModel, num_files: int) -> list[str]:
    generator = torch.Generator().manual_seed(_SEED + 1)
    digests = []
    for index in range(num_files):
        with blobs.create() as writer:
            writer.write(save(_random_weights(base, kind, RANKS[index % len(RANKS)], generator)))
            digests.append(writer.commit())
    return digests


def _random_weights(base: BaseShape, kind: PoolModel, rank: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors as PEFT names them; in bfloat16, as adapters mostly come."""
    tensors = {}
    for layer in range(base.num_layers):
        for module in (base.modules[index] for index in kind.modules):
            path = f"base_model.model.{base.layer_prefix}.{layer}.{module.path}"
            for part, sizes in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                values = torch.randn(sizes, generator=generator).mul_(0.02)
                tensors[f"{path}.lora_{part}.weight"] = values.to(torch.bfloat16)
    return tensors

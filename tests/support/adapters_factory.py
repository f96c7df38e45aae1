"""Random LoRA checkpoints as PEFT writes them, and the plain computation they stand for.

Small and quick, for tests that need many adapters of odd ranks; where PEFT itself must have written the folder, use
`tiny_models.make_adapter`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora_files import PEFT_DEFAULTS, base_shape
from manylora.adapters.base_shape import MODULE_PATHS, SITES, BaseShape
from manylora.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from manylora.adapters.lora.layout import LoraLayout, plan_layout
from manylora.adapters.lora.packing import Packing
from manylora.memory.geometry import PageGeometry

ALL_MODULES = tuple(range(len(MODULE_PATHS)))
Q_AND_V = (0, 2)


def tiny_base(
    num_layers: int = 2, hidden: int = 48, kv: int = 16, intermediate: int = 80
) -> BaseShape:
    """A base whose widths are no multiples of 128, so that row padding is there."""
    return base_shape(hidden, intermediate, kv, num_layers)


def tensor_bytes(content: bytes, checkpoint: Checkpoint) -> io.BytesIO:
    """The content of a weights file from its first tensor on, as a packer reads it."""
    return io.BytesIO(content[min(tensor.entry.start for tensor in checkpoint.tensors) :])


def packed(
    folder: Path, base: BaseShape, geometry: PageGeometry, dtype: torch.dtype, max_rank: int = 256
) -> tuple[Checkpoint, LoraLayout, torch.Tensor]:
    """A checkpoint, its layout, and its page images, which were NaN before: bytes [pages, page_bytes]."""
    path = folder / "adapter_model.safetensors"
    checkpoint = read_checkpoint(
        (folder / "adapter_config.json").read_bytes(), path, base, max_rank
    )
    layout = plan_layout(checkpoint.ranks, base, geometry)
    images = torch.full((layout.num_pages, geometry.page_bytes), 0xFF, dtype=torch.uint8)
    Packing(checkpoint, layout, base, geometry).pack(
        tensor_bytes(path.read_bytes(), checkpoint), list(images), dtype
    )
    return checkpoint, layout, images


@dataclass(frozen=True)
class RandomLora:
    """One adapter in plain tensors."""

    base: BaseShape
    lora_a: dict[tuple[int, int], torch.Tensor]
    """[rank, in] by (layer, module)."""
    lora_b: dict[tuple[int, int], torch.Tensor]
    """[out, rank] by (layer, module)."""
    scalings: dict[tuple[int, int], float]
    config: dict[str, object]

    @property
    def ranks(self) -> dict[tuple[int, int], int]:
        return {key: a.shape[0] for key, a in self.lora_a.items()}

    def delta(self, layer: int, site: int, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds at a site, in float64 and then x's dtype: [T, sum of the widths]."""
        parts = []
        for module in SITES[site].modules:
            key = (layer, module)
            if key in self.lora_a:
                h = x.double() @ self.lora_a[key].to(x.dtype).double().t()
                part = h @ self.lora_b[key].to(x.dtype).double().t() * self.scalings[key]
            else:
                part = torch.zeros(
                    len(x), self.base.modules[module].out_features, dtype=torch.float64
                )
            parts.append(part)
        return torch.cat(parts, dim=1)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
        """Write adapter_config.json and adapter_model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        tensors = {}
        for part, matrices in (("lora_A", self.lora_a), ("lora_B", self.lora_b)):
            for (layer, module), matrix in matrices.items():
                path = f"{self.base.layer_prefix}.{layer}.{MODULE_PATHS[module]}"
                tensors[f"base_model.model.{path}.{part}.weight"] = matrix.to(dtype).contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder


def random_lora(
    base: BaseShape,
    rank: int,
    *,
    seed: int,
    alpha: float | None = None,
    modules: tuple[int, ...] = ALL_MODULES,
    layers: tuple[int, ...] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    use_rslora: bool = False,
) -> RandomLora:
    """Make an adapter; patterns are keyed by module name (`q_proj`), alpha is twice the rank when None."""
    alpha = 2.0 * rank if alpha is None else alpha
    generator = torch.Generator().manual_seed(seed)
    lora_a, lora_b, scalings = {}, {}, {}
    for layer in range(base.num_layers) if layers is None else layers:
        for module in modules:
            shape = base.modules[module]
            r = (rank_pattern or {}).get(shape.name, rank)
            module_alpha = (alpha_pattern or {}).get(shape.name, alpha)
            lora_a[layer, module] = (
                torch.randn(r, shape.in_features, generator=generator) / shape.in_features**0.5
            )
            lora_b[layer, module] = torch.randn(shape.out_features, r, generator=generator) / (
                4 * r**0.5
            )
            scalings[layer, module] = module_alpha / (r**0.5 if use_rslora else r)
    config = {
        **PEFT_DEFAULTS,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [base.modules[module].name for module in modules],
        "use_rslora": use_rslora,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        "layers_to_transform": None if layers is None else list(layers),
    }
    return RandomLora(base, lora_a, lora_b, scalings, config)

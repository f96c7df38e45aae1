"""An adapter version as all code below the registry knows it: its identity, and its place in memory. No torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AdapterTier = Literal["stored", "host", "device"]
"""Nearest memory that has the adapter: only the blob store, host memory (packed), or device memory (usable)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The fields of `adapter_config.json` that change the result."""

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Rank by suffix of the module path. Suffixes are literal; the first that matches at a dot counts, as in PEFT."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Alpha by suffix of the module path, matched like `rank_pattern`."""

    def module_rank(self, module_path: str) -> int:
        """Rank of one module, by its full path (`model.layers.0.self_attn.q_proj`)."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module_path), self.rank)

    def module_scaling(self, module_path: str) -> float:
        """Factor of `B @ A` at one module: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank = self.module_rank(module_path)
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, module_path), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def canonical(self) -> dict[str, object]:
        """Fields as JSON types, equal for equal specs. A pattern is a list of pairs, because its order counts."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: list(value.items()) if isinstance(value, dict) else value
            for name, value in fields.items()
        }

    @classmethod
    def from_canonical(cls, fields: Mapping[str, Any]) -> LoraSpec:
        """Read fields that `canonical` wrote."""
        read: dict[str, Any] = {
            name: dict(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**read)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """One immutable adapter version, ready to be loaded."""

    tenant_id: str
    adapter_id: str
    version: int
    digest: str
    """`sha256:<64 hex>` of the canonical content. Adapters with equal digests give equal results."""
    weights_sha256: str
    """SHA-256 of the blob with the safetensors file, 64 hex digits."""
    config: LoraSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentAdapter:
    """An adapter that is in device or host memory, or on its way there."""

    digest: str
    tier: AdapterTier | Literal["loading"]
    pages: int
    """Pages of its image; 0 while unknown."""
    running: int
    """Running requests that use it."""
    pinned: bool = False
    holds: int = 0
    """Requests that wait for it."""
    uses: int = 0
    """Requests that began to run with it since it came to memory."""
    prefix_pages: int = 0
    """Pages of cached KV that were computed with it."""
    slot: int = -1
    """Its adapter slot; -1 if it has none, because it is in host memory or still loading."""
    loads: int = 0
    """Number of loads to the device since it was last forgotten."""
    load_p95_s: float | None = None
    """95th percentile of its last 32 load times in seconds, from the first hold on; None before the first load."""


def content_digest(spec: LoraSpec, weights_sha256: str) -> str:
    """Digest of an adapter version: config fields that change the result, and the weights."""
    content = {"format": 1, "config": spec.canonical(), "weights": weights_sha256}
    encoded = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return "sha256:" + hashlib.sha256(encoded).hexdigest()


def _first_match(
    pattern: dict[str, object] | dict[str, int] | dict[str, float], module_path: str
) -> str:
    if not pattern:
        return ""
    parts = module_path.split(".")
    matches = [key for start in range(len(parts)) if (key := ".".join(parts[start:])) in pattern]
    if len(matches) <= 1:
        return matches[0] if matches else ""
    return next(key for key in pattern if key in matches)
